"""Make the demo policy of `assets/demo-policy/` from nothing: tokenizer, SFT data, random weights, then SFT.

    python tools/make_demo_policy.py --overwrite     # everything, ten minutes on two cores
    python tools/make_demo_policy.py --student --overwrite   # assets/demo-student, a few minutes
    python tools/make_demo_policy.py --no-sft        # stop before training, to look at the data
    python tools/make_demo_policy.py --moe           # seconds: its sibling with experts, runs/demo-moe

The training itself is the product's own command (`megatron-tlt sft`), run as a subprocess: this file holds
only what is particular to the demo. It is stopped early on purpose: RL must find room to improve.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from demo_traces import ANSWER_CLOSE, ANSWER_OPEN, generate
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from megatron_tlt.config.checks.files import note_maker, output_directory_problems
from megatron_tlt.config.run import UNFINISHED
from megatron_tlt.models.hf.config import ModelConfig
from megatron_tlt.models.hf.loader import iter_weights
from megatron_tlt.models.hf.writer import save_hf

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parent.parent
WORK, MOE = "make_demo_policy --work", "make_demo_policy --moe"  # what made_by.json says

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")

# One role token before each message, one end token after it; the assistant's last turn is left open.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

# reasoning-gym's number_sorting ends every prompt with these lines.
SORTING_RULES = (
    "\nPlease follow the instruction below:\n## 1. Let all your answers be a list of numbers."
    " Instead of reporting your answer as -69, -13, 1, 7, 11, 43, 59, 61,"
    " use ['-69', '-13', '1', '7', '11', '43', '59', '61'] instead\n## 2."
    " Convert all numbers in the square brackets as strings."
    " For example, ['-69', '-13', '1', '7', '11', '43', '59', '61']\n"
)

# The fixed sentences of the prompts, one token each: as bytes they would be most of the text, and nothing in
# them is to be learned.
PHRASES = (
    "State the final answer to the following arithmetic problem: ",
    "Calculate ",
    "Sort these numbers in ascending order: ",
    "Sort these numbers in descending order: ",
    SORTING_RULES,
    "Spell this word backward (example: sun -> nus): ",
    ANSWER_OPEN,
    ANSWER_CLOSE,
)

# Byte pairs that become one token, best first, in the byte-level alphabet (Ġ is a space). None holds a digit.
MERGES = (
    (",", "Ġ"),
    ("Ġ", "+"),
    ("Ġ+", "Ġ"),
    ("Ġ", "-"),
    ("Ġ-", "Ġ"),
    ("Ġ", "="),
    ("'", ",Ġ"),
    ("',Ġ", "'"),
    ("[", "'"),
    ("'", "]"),
    (":", "Ġ"),
)

# A multiple of 32, so that the vocabulary divides over tensor-parallel ranks; the last rows are spare.
VOCAB_SIZE = 288
MAX_POSITIONS = 1024

# About 1 / sqrt(width); the usual 0.02 is made for wide models. With 0.02 the model could not yet copy a number
# from its prompt after 1.3M tokens; with 0.08 it could after 0.8M. That restart also changed the batch, the
# warm-up and beta2, so the improvement may have other causes.
INIT_STD = 0.08

# Of the demo policy, and of the student that learns from it in configs/distill. Deep and narrow on purpose: a drafter
# of one layer must cost far less than the policy it drafts for.
POLICY_SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 12}
STUDENT_SIZES = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 6}
# The student is stopped when it has the form of the responses and solves few prompts.
STUDENT_TRAINING = ("sft.num_steps=500",)

EXPERTS = 8  # of a layer of the sibling with experts; each token takes two
EXPERT_NOISE = 0.2  # relative, of each weight of an expert: they differ, and any two together still compute the MLP


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of fewer than 288 tokens: any text can be written, digits are always single tokens."""
    specials = [PAD, BOS, EOS, *ROLES]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*specials, *alphabet, *("".join(m) for m in MERGES)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    tokenizer.add_tokens([AddedToken(p, special=False, normalized=False) for p in PHRASES])
    if tokenizer.get_vocab_size() > VOCAB_SIZE:
        raise ValueError(f"{tokenizer.get_vocab_size()} tokens do not fit a vocabulary of {VOCAB_SIZE}")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        extra_special_tokens=list(ROLES),
    )


def model_config(tokenizer: PreTrainedTokenizerFast, sizes: dict[str, int]) -> Qwen3Config:
    """A Qwen3 of these sizes and the tokenizer's vocabulary."""
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        **sizes,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        initializer_range=INIT_STD,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def calm_residual_stream(model: Qwen3ForCausalLM) -> None:
    """Scale down, in place, what each block adds: the sum over all blocks starts at the size of one."""
    scale = (2 * model.config.num_hidden_layers) ** -0.5
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.data.mul_(scale)


def write_start(folder: Path, seed: int, sizes: dict[str, int]) -> int:
    """Write tokenizer, config and random weights as a Hugging Face directory; returns the parameter count."""
    tokenizer = build_tokenizer()
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(model_config(tokenizer, sizes))
    calm_residual_stream(model)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.update(do_sample=True, temperature=1.0, max_new_tokens=512)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()


def experts_of(dense: Path, seed: int) -> tuple[ModelConfig, Iterator[tuple[str, torch.Tensor]]]:
    """A mixture of experts with the weights of `dense`: in every second layer its MLP, EXPERTS times, each with noise
    of its own, and a random router (sparse upcycling, Komatsuzaki et al., 2212.05055). Gates sum to 1, so it answers
    nearly as the dense model does.
    """
    source = ModelConfig.from_hf(dense)
    config = replace(
        source,
        family="qwen3_moe",
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        moe_intermediate_size=source.intermediate_size,
        norm_topk_prob=True,
        moe_layers=tuple(range(1, source.num_layers, 2)),
    )
    generator = torch.Generator().manual_seed(seed)

    def varied(tensor: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(EXPERTS, *tensor.shape, generator=generator)
        return tensor * (1 + EXPERT_NOISE * noise)

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        given = dict(iter_weights(dense, source))
        for name, shape in config.parameter_shapes().items():
            stem = name.partition(".mlp.")[0] + ".mlp."
            if name in given:
                yield name, given[name]
            elif name.endswith("gate_up_proj"):
                halves = [given[f"{stem}{part}_proj.weight"] for part in ("gate", "up")]
                yield name, varied(torch.cat(halves))
            elif name.endswith("down_proj"):
                yield name, varied(given[f"{stem}down_proj.weight"])
            else:
                yield name, torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    return config, weights()


def write_experts(dense: Path, out: Path, seed: int) -> int:
    """Write the sibling of `dense` with experts as a Hugging Face directory; returns its parameter count."""
    config, weights = experts_of(dense, seed)
    save_hf(out, config, weights, torch.bfloat16)
    note_maker(out, MOE)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copyfile(dense / name, out / name)
    return config.num_parameters


def write_jsonl(path: Path, count: int, seed: int) -> None:
    """Write `count` records {"prompt", "completion"} of the mix, with the task's label for the reader."""
    with path.open("w", encoding="utf-8") as out:
        for example in generate(count, seed):
            record = {"prompt": example.prompt, "completion": example.completion, "task": example.task}
            out.write(json.dumps(record) + "\n")


def sft_command(args: argparse.Namespace) -> list[str]:
    """The training command: the product's own launcher and `sft`, its paths set as dotted overrides."""
    program = [str(ROOT / "launch" / "local.sh"), "-n", str(args.ranks), "--cmd", "sft"]
    overrides = [
        f"model.path={args.work / 'start'}",
        f"sft.train_path={args.work / 'train.jsonl'}",
        f"sft.eval_path={args.work / 'heldout.jsonl'}",
        f"sft.out={args.out}",
    ]
    fewer = STUDENT_TRAINING if args.student else ()
    anew = [] if (args.out / UNFINISHED).is_dir() else ["checkpoint.resume=never"]  # else it replaces nothing finished
    return [*program, str(args.config), *overrides, *anew, *fewer, *args.override]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--work", type=Path, help="data and random weights (runs/demo-policy; with --student runs/demo-student)"
    )
    parser.add_argument(
        "--out", type=Path, help="directory to write (assets/demo-policy; also assets/demo-student, runs/demo-moe)"
    )
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "sft-demo.yaml", help="the SFT recipe")
    parser.add_argument("--examples", type=int, default=120_000, help="training examples")
    parser.add_argument("--heldout", type=int, default=500, help="held-out examples")
    parser.add_argument("--seed", type=int, default=0, help="of the weights; the data takes two streams of its own")
    parser.add_argument("--ranks", type=int, default=2, help="MPI ranks of the training")
    parser.add_argument(
        "--moe", action="store_true", help="only make a mixture of experts of the policy in assets: no training"
    )
    parser.add_argument("--student", action="store_true", help="the smaller model that learns from the policy")
    parser.add_argument("--overwrite", action="store_true", help="write into --out where it has files")
    parser.add_argument("--no-sft", action="store_true", help="write data and random weights, do not train")
    parser.add_argument("override", nargs="*", help="further dotted overrides of the recipe, as sft.num_steps=100")
    args = parser.parse_args(argv)
    name = "demo-student" if args.student else "demo-policy"
    args.work = args.work or ROOT / "runs" / name
    args.out = args.out or ROOT / ("runs/demo-moe" if args.moe else f"assets/{name}")
    writes = args.moe or not args.no_sft
    if writes and not args.overwrite and args.out.is_dir() and any(args.out.iterdir()):
        parser.error(f"--out = '{args.out}': exists: --overwrite replaces it")
    made = [] if args.moe else output_directory_problems("--work", args.work, WORK)
    if writes:
        made += output_directory_problems("--out", args.out, MOE if args.moe else "sft", [args.work])
    if made:
        parser.error(str(made[0]))
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the whole recipe; the exit status is that of the training."""
    args = parse_args(argv)
    if args.moe:
        count = write_experts(ROOT / "assets" / "demo-policy", args.out, args.seed)
        print(f"{count:,} parameters in {args.out}")
        return 0
    args.work.mkdir(parents=True, exist_ok=True)
    note_maker(args.work, WORK)
    sizes = STUDENT_SIZES if args.student else POLICY_SIZES
    print(f"random weights: {write_start(args.work / 'start', args.seed, sizes):,} parameters in {args.work / 'start'}")
    write_jsonl(args.work / "train.jsonl", args.examples, seed=1)
    write_jsonl(args.work / "heldout.jsonl", args.heldout, seed=2)
    print(f"data: {args.examples} and {args.heldout} examples in {args.work}")
    command = sft_command(args)
    print(" ".join(command), flush=True)
    return 0 if args.no_sft else subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
