"""Answers and reward functions of public reports, and what a killed rank leaves behind."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from megatron_tlt.config.data import RewardConfig, RewardSection
from megatron_tlt.rewards.base import judge
from megatron_tlt.rewards.build import answer_warning, build_scorers, function_problems
from megatron_tlt.rewards.spelling import conclusion, plain
from megatron_tlt.types import Prompt, RewardResult, Sample

ROOT = Path(__file__).parents[2]
TAG = r"<answer>(.*?)</answer>"


def judged(answer: Any, text: str, **config: Any) -> RewardResult:
    scorers = build_scorers(RewardSection(functions=(RewardConfig(**config),)))
    return judge(scorers, -1.0, Prompt(0, "d:0", (), "q", answer), Sample(0, 0, [], [], text, "stop", 0))


def in_tags(answer: Any, response: str) -> float:
    result = judged(answer, f"so <answer>{response}</answer>", name="math", pattern=TAG)
    assert result.failure is None
    return result.value


RIGHT = {
    "currencies": [
        (r"\$18.90", "18.90"), ("18.90", r"\$18.90"), ("18", "$18"), ("18", "$18 per day"), ("18", "€ 18.00"),
        ("18", "18 €"), ("18", "£18"), ("18", "US$18"), ("18", "18 USD"), ("18", "Rs. 18"), ("-18", "-$18"),
        (r"\boxed{\$18}", "18"), ("18", r"\boxed{\$18}"), (r"\$\,18", "18 dollars"), ("70000", r"\$70{,}000"),
    ],
    "sizes": [
        ("70000", "$70k"), ("70000", r"\$70K"), ("1000000", "1 million"), ("1500000", r"1.5\text{ million}"),
        ("2 billion", "2000000000"), ("1234.50", "1.234,50"), ("1234567", "1.234.567"), ("1000", "1_000"),
        ("1234567", "1'234'567"), ("1234567", "1٬234٬567"),
    ],
    "units": [
        ("9 chickens", "9"), ("9", "9 chickens"), ("3/4 cup", "3/4"), ("3/4", "3/4 cup"), ("50", "50 km/h"),
        ("9.8", "9.8 m/s²"), ("5", "5 cm^2"), ("100", "100m²"), ("16", "16 (sixteen)"), ("37", "37°C"),
        (r"30^\circ", "30 degrees"), ("5", r"5\text{ cm}"), ("18", "18%"), ("10", "10 V"), ("60", "60 miles per hour"),
        ("18", "x = 18 cm"), ("18", "about 18"), (r"\frac{3}{4}", "3/4 cup"), ("18", r"\boxed{18 eggs}"),
        ("3 cm", "3 centimeters"), ("60 mph", "60 miles per hour"), (r"90^\circ", "90°"),
        ("6", "6 Octagons"), ("5 Marbles", "5"), ("7", "7 Novels"),
        ("1/3", r"the final answer is $\frac{1}{3}$, it's 0.33"),
    ],
    "spellings": [
        ("1000", "1 000"), ("1000.99", "1000,99"), ("1000", "1,000"), ("1000", "1\u202f000"), ("1,22", "1.22"),
        ("-5", "−5"), ("-5", "–5"), ("-5", "minus 5"), ("½", "0.5"), ("3/2", "1½"), ("2.5", "2 1/2 cups"),
        (".5", "1/2"), ("1500", "1.5e3"), ("1e-7", "0.0000001"), ("3e8", "3 × 10^8 m/s"),
        ("6.02e23", r"6.02 \times 10^{23}"), ("25", "5²"), (r"2\sqrt{3}", "2√3"), (r"\frac{\pi}{4}", "pi/4"),
        ("x^2+1", "x**2 + 1"), ("18", "１８"),
    ],
    "markdown and words": [
        ("73", "**73**"), ("**73**", "73"), ("18", "*18*"), ("18", "`18`"), ("18", "“18”"), ("18", "18."),
        ("18", "**18** dollars"), ("B", "**(B)**"), ("B", "B."), ("(B)", "B"), ("yes", "Yes."), ("June 5", "June 5"),
        ("September 5", "Sept. 5"),
        (r"\text{no solution}", "no solution"), ("12:30 pm", "12:30 PM"),
        ("18", "<b>18</b>"), ("10:30 AM", "10:30 a.m."), ("3:4", "3 to 4"), (r"\emptyset", r"\varnothing"),
        ("C", "C. 12 meters"), ("C", "(C) the cat"), (r"\textbf{(C)}~5", "C"), ("2 1/2", "2 1/2."),
    ],
    "mathematics as before": [
        ("A", "A"), ("(1, 2)", "(1,2)"), ("x^2+1", "1 + x^2"), ("[0,1)", "[0, 1)"), ("{1,2}", "{2,1}"), ("1,2", "2, 1"),
        (r"\frac12", "0.5"), ("x=5", "5"), ("5", "x = 5"), ("24", "4!"), ("x < 3", "3 > x"), (r"2^{10}", "1024"),
    ],
}  # fmt: skip
WRONG = [
    ("18", "180"), ("18", "1.8"), ("18", "18 or 19"), ("18", "19 or 18"), ("18", "The answer is not 18"),
    ("18", "not 18"), ("18", "It isn't 18."), ("18", "18x"), ("18", "18 x"), ("18", "x + 18"), ("18", "(1, 18)"),
    ("18", "17, 18"), ("18", "[0, 18)"), ("18", "x < 18"), ("18", "2 x 18"), ("18", "18²"), ("18", "√18"),
    ("18", "1/18"), ("18", "minus 18"), ("18", "18 and a half"), ("18", "between 4 and 18"), ("18", "18 squared"),
    ("18", "log 18"), ("5", "5!"), ("5", "5½"), ("5", "5 1/2"), ("30", "1 hour 30 minutes"), (r"\$18.90", "1890"),
    (r"\$18.90", "18"), ("9 chickens", "8 chickens"), ("3/4 cup", "4/3 cup"), ("3/4 cup", "1/4"), ("1000", "1.000"),
    ("1000.99", "1000,98"), ("1e-7", "2e-7"), ("1e-7", "0"), ("x=5", "y = 5 cm"), ("(1, 2)", "(3, 2)"),
    ("x^2 + 1", "x^3 + 1"), ("x^2 + 1", "1"), ("2 1/2", "1/2"), ("2π", "2"), ("73", "7**3"), ("A", "B"),
    ("3 cm", "3 m"), (r"5\text{ cm}", r"5\text{ m}"), ("30 minutes", "30 hours"), ("60 mph", "60 km/h"),
    ("5 dollars", "5 cents"), ("$5", "5 cents"), ("7", "7 million"), ("18", r"\$18\text{ million}"), ("5", "June 5"),
    ("June 5", "July 5"), ("5 May", "5 Mar"), ("18", "19 = 18"), ("204_5", "204_6"), ("3", "3–4"), ("18", "twice 18"),
    ("18", "anything but 18"), ("1234", "1.234"), ("C", "C) or D)"), ("C", "B. C major"), ("B", "not B"),
    ("no solution", "solution"), ("10:30", "30"), ("5", ""), ("5", "the final answer is $5$, that is 7"),
    ("7", "the final answer is $5$, that is 7"),
]  # fmt: skip


@pytest.mark.parametrize("kind", RIGHT)
def test_math_reads_the_spellings_of_real_answers(kind: str) -> None:
    assert [pair for pair in RIGHT[kind] if in_tags(*pair) != 1.0] == []


def test_math_gives_nothing_for_what_is_not_the_answer() -> None:
    assert [pair for pair in WRONG if in_tags(*pair) != 0.0] == []


def test_a_currency_in_the_reference_is_found_in_a_whole_response() -> None:
    assert judged(r"\$18.90", r"She pays \$18.90 in all.", name="math").value == 1.0
    assert judged(r"\$18.90", r"So it is $\boxed{18.9}$.", name="math").value == 1.0
    assert judged(r"\$18.90", r"So it is $\boxed{18.8}$.", name="math").value == 0.0


@pytest.mark.parametrize(
    ("gold", "response", "value"),
    [
        ("even", r"It is \boxed{even}.", 1), ("2 1/2", r"\boxed{2 1/2}", 1), ("12345", r"So $\boxed{12 345}$.", 1),
        ("18", r"\boxed{18 eggs per day}", 1), ("18", r"\boxed{18 \text{ or } 19}", 0),
        ("3 cm", r"\boxed{3\text{ m}}", 0),
        ("1,2", r"$x=\boxed{1}$ or $x=\boxed{2}$", 1), ("1", r"$\boxed{1}$ .. wait, $\boxed{2}$", 0),
        ("17", "<think>\\boxed{17}</think>\n**18**", 0), ("18", "<think>\\boxed{17}</think>\n**18**", 1),
        ("17", "<think>\\boxed{17}</think>", 1), ("C", "The answer is **C**.", 1), ("C", "**Answer: (C)**", 1),
        ("C", "Answer: B", 0), ("(1, 2)", "The answer is (1,2).", 1), ("x^2+1", "#### 1 + x^2", 1),
        ("x+1", "<think>a</think><answer>x+1</answer>", 1), ("18", "The answer is 18 or 19.", 0), ("18", "18x", 0),
        ("18", "18, because 9 + 9 = 18.", 1), ("2", "Answer: 5x + 2 = 12, so x = 2", 1),
        ("10", "The answer is 10:30.", 0), ("5", "I write it in <answer> tags. <answer>5</answer>", 1),
        ("5", "The answer is in <answer>5</answer>, not in <answer>.", 1),
        ("18", "The answer is 18. This answer is correct because 9 + 9 = 18.", 1), ("pi", "Answer: $\\pi$", 1),
        ("18", "The answer is 18, because there are 2 boxes of 9.", 1), ("x+1", "Answer: x+1, since $x+2$ is odd.", 1),
        ("18", "Answer: She has 16 - 7 = 9 eggs. So the total is 18 dollars.", 1),
        ("18", "The answer is as follows:\n18", 1),
        ("18", "#### Step 2: times 2\nSince 9 * 2 = 18, she makes 18 dollars.", 1), ("18", "9 * 2 = 18", 1),
        ("18", "Janet has 16 eggs. She eats 3. She sells 9 for $18.", 1), ("C", "C. 12 meters", 1),
        ("3 red and 4 blue balls", "The answer is 3 red and 4 blue balls.", 1), ("A, C", r"\boxed{A} and \boxed{C}", 1),
        # A displayed formula is a line; no heading is an answer, nor a box or tag that the response only mentions.
        ("18", "The final answer is:\n$$\n18\n$$", 1), ("18", "Answer:\n\\[\nx = 18\n\\]", 1),
        ("18", "<answer>\n\\[\nx = 18\n\\]\n</answer>", 1), ("17", "The final answer is:\n$$\n18\n$$", 0),
        ("0.5", "**Final Answer**:\n\n$$\n\\frac{1}\n{2}\n$$\n", 1), ("18", "Answer:\n\\[\n18", 1),
        ("18", "#### 18.\n\nQuestion: Tom has 3 apples.", 1), ("3", "#### 18.\n\nQuestion: Tom has 3 apples.", 0),
        ("even", "#### even\n\nQuestion: Tom has 3 apples.", 1), ("18", "#### **1. Sell 9**\n9 * 2 = 18", 1),
        ("18", "Answer: She has 16 - 7 = 9 eggs. So the total is 18 dollars.\n\nQuestion: Tom has 3 apples.", 1),
        ("18", r"I put it in \boxed{}. The answer is 18.", 1), ("18", r"\boxed{18} (in \boxed{})", 1),
        ("18", "It goes in \\boxed{...}.\nSo she has 18 dollars", 1), ("even", r"\boxed{even}, in \boxed{ }", 1),
        ("18", "<answer>18</answer> (in <answer></answer>)", 1), ("18", "The answer is 10 hours and 18 minutes.", 0),
        (("5", "$"), "I think\nthat it is 7", 0), (r"\{\}", r"So $\boxed{\{\}}$ it is.", 1),
    ],
)  # fmt: skip
def test_math_compares_the_conclusion_of_a_whole_response(gold: Any, response: str, value: float) -> None:
    assert judged(gold, response, name="math").value == value


@pytest.mark.parametrize(
    ("response", "value"),
    [
        (r"\boxed{5} so the answer is 9.", "5"), (r"$\boxed{5}$ and then $\boxed{7}$, the final answer is $9$", "7"),
        (r"$x=\boxed{5}$ or $x=\boxed{7}$", None), (r"\boxed{5}, \text{ and } \boxed{7}", None),
        ("The answer is 5. Wait, the answer is 7.", "7"), ("<answer>5</answer> so the answer is 9", "9"),
        ("The answer is $5$, that is 7", "7"), ("5, 7 and 9", None), ("Answer: 5, 7, 9", None),
        ("It is about 5 eggs.\nSo the sum is 7", "7"), ("The final answer $5$\nthat is 7", "7"),
        ("Janet has 5 eggs. She sells them for 9.", "9"), ("The answer is about 5. I also think of $7$", "5"),
        ("The final answer is $5$, that is 7", "7"), ("#### 5 #### 7", "7"),
        ("Answer: we first get $5$ from this part. So the sum is 7", "5"), ("5; or maybe 7", "7"),
        ("the answer is 5, because 7 is odd, so 9", "5"),
    ],
)  # fmt: skip
def test_math_reads_one_number_of_a_response(response: str, value: str | None) -> None:
    right = [gold for gold in ("5", "7", "9") if judged(gold, response, name="math").value == 1.0]
    assert right == ([] if value is None else [value])


@pytest.mark.parametrize(("text", "pattern"), [(f"<answer>{'7' * 60_000}</answer>", TAG), ("\\boxed{" * 30_000, None)])
def test_a_model_that_repeats_itself_costs_no_minute(text: str, pattern: str | None) -> None:
    start = time.monotonic()
    assert judged("5", text, name="math", pattern=pattern).value == 0.0
    assert time.monotonic() - start < 25, "math-verify ends itself after 3 s a call; quadratic time is a minute or more"


@pytest.mark.parametrize(
    "text",
    [
        "####" + 200_000 * "a", "\\[" * 60_000, "$$ " * 80_000, "\\boxed{" * 20_000 + "}" * 20_000, "<b>" * 40_000,
        "é" + "7" * 60_000, "answer is 7" + " " * 60_000 + "x", "<answer>7" * 5_000, "Answer: so\n" * 5_000,
    ],
)  # fmt: skip
def test_a_conclusion_takes_time_in_proportion_to_the_response(text: str) -> None:
    start = time.process_time()
    plain(conclusion(text)[0]), plain(text)
    assert time.process_time() - start < 1.5, "linear: half a second at most; quadratic: some 3 and more"


def test_the_best_of_the_acceptable_answers_counts() -> None:
    answers = ("1/3", "no solution")
    assert [in_tags(answers, text) for text in ("No solution", r"\frac{1}{3}", "3")] == [1.0, 1.0, 0.0]
    exact = {"name": "exact", "pattern": TAG}
    assert [judged(answers, f"<answer>{text}</answer>", **exact).value for text in ("1/3\n", "0.3")] == [1.0, 0.0]
    assert "no reference answer" in (judged((), "<answer>1</answer>", **exact).failure or "")


def test_an_answer_with_nothing_to_compare_is_named_with_its_row() -> None:
    section = RewardSection(functions=(RewardConfig(name="math"),))
    text = answer_warning(section, [("a.jsonl:1", "5"), ("a.jsonl:2", " $ "), ("a.jsonl:3", None)])
    assert text is not None
    assert re.match(r"a\.jsonl:2: reward 'math' .* the answer ' \$ '; .*recorded failure \(2 row\(s\)\)", text)
    assert answer_warning(section, [("a.jsonl:1", r"\$18.90"), ("a.jsonl:2", ("", "x"))]) is None
    section = RewardSection(functions=(RewardConfig(name="exact"),))
    text = answer_warning(section, [("a.jsonl:1", ("", "x")), ("a.jsonl:2", " ")])
    assert text is not None and text.startswith("a.jsonl:2: reward 'exact' has nothing to compare with")


BAD_FUNCTIONS = """
import functools
async def later(prompt, answer, response, metadata): return 1.0
def many(prompt, answer, response, metadata): yield 1.0
async def stream(prompt, answer, response, metadata): yield 1.0
class Score:
    def __init__(self, prompt, answer, response, metadata): pass
class Judge:
    async def __call__(self, prompt, answer, response, metadata): return 1.0
judge = Judge()
part = functools.partial(later)
def verl(data_source, solution_str, ground_truth, extra_info=None): return 1.0
def swapped(prompt, response, answer, metadata): return 1.0
def trl(prompts, completions, answer, **columns): return [1.0]
def batch(prompt, answer, completions, metadata): return [1.0]
def named(prompt, answer, *, response, metadata): return 1.0
"""
GOOD_FUNCTIONS = """
import asyncio, functools
async def _later(answer, response): return float(response in answer)
def run(prompt, answer, response, metadata): return asyncio.run(_later(answer, response))
def anything(*args, **more): return args[1] == [args[2]]
class Judge:
    def __call__(self, question, ground_truth, completion, extra_info): return isinstance(ground_truth, list)
judge = Judge()
part = functools.partial(anything, more=1)
lambda_ = lambda p, a, r, m: True
"""


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("later", "is async"), ("many", "is a generator"), ("stream", "is async"), ("Score", "is a class"),
        ("judge", "is async"), ("part", "is async"), ("verl", "'solution_str' is argument 2"),
        ("swapped", "'response' is argument 2"), ("trl", "takes"), ("batch", "of a batch"), ("named", "takes"),
    ],
)  # fmt: skip
def test_a_function_that_cannot_give_a_number_is_refused_at_load(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "bad.py").write_text(BAD_FUNCTIONS)
    config = RewardConfig(name="python", path=f"{tmp_path}/bad.py:{name}")
    (problem,) = function_problems(RewardSection(functions=(config,)))
    assert problem.path == "rewards.functions.0.path"
    assert why in problem.allowed


@pytest.mark.parametrize("name", ["run", "anything", "judge", "part", "lambda_"])
def test_other_callables_are_accepted_and_several_answers_are_a_list(tmp_path: Path, name: str) -> None:
    (tmp_path / "good.py").write_text(GOOD_FUNCTIONS)
    assert judged(("7",), "7", name="python", path=f"{tmp_path}/good.py:{name}").value == 1.0
