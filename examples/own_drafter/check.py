"""Checks an exported EAGLE-3 drafter against its policy: check.py DRAFTER POLICY

Prints what a serving engine will load. Ends with code 1 and a message if the directory cannot be a drafter of POLICY.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file


def layer_ids(config: dict) -> list[int]:
    """Policy layers whose outputs the drafter reads, from 0. vLLM counts the layers before the tap: one more."""
    nested = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    return nested or [i - 1 for i in config["eagle_aux_hidden_state_layer_ids"]]


def problems(config: dict, tensors: dict, policy: dict) -> list[str]:
    """Contradictions to the policy's config.json, or within the drafter's own."""
    H, V = policy["hidden_size"], config["draft_vocab_size"]
    layers = layer_ids(config)
    shapes = {"fc.weight": (H, len(layers) * H), "lm_head.weight": (V, H), "norm.weight": (H,)}
    found = [
        f"{name}: {tuple(tensors[name].shape)} in place of {shape}"
        for name, shape in shapes.items()
        if tuple(tensors[name].shape) != shape
    ]
    found += [f"{name} is not finite" for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if not all(0 <= layer < policy["num_hidden_layers"] - 1 for layer in layers):
        found.append(f"reads layers {layers} of a policy with {policy['num_hidden_layers']}")
    if config["vocab_size"] != policy["vocab_size"]:
        found.append(f"vocabulary of {config['vocab_size']}, the policy has {policy['vocab_size']}")
    if "d2t" in tensors:  # the policy's token of each drafted one, as an offset
        targets = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
        if targets.min() < 0 or targets.max() >= policy["vocab_size"]:
            found.append("d2t names tokens that the policy does not have")
    return found


def main(drafter: Path, policy: Path) -> None:
    """Prints the summary, or ends with the problems."""
    config = json.loads((drafter / "config.json").read_text())
    tensors = load_file(drafter / "model.safetensors")
    if found := problems(config, tensors, json.loads((policy / "config.json").read_text())):
        raise SystemExit("\n".join(found))
    size = sum(tensor.numel() for tensor in tensors.values())
    print(f"{drafter}: {size:,} parameters, reads layers {layer_ids(config)}")
    print(f"drafts {config['draft_vocab_size']} of {config['vocab_size']} tokens")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
