"""Environments as users write them: one that does what a turn says, one of Gymnasium's kind, a class of tools."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import time

from megatron_tlt.envs.base import Environment, Step
from megatron_tlt.types import Prompt


class Act(Environment):
    """Does what the turn says; `pid` and `lost` name the process."""

    def reset(self, prompt: Prompt, seed: int) -> str:
        self.told = [f"{prompt.text} {seed}"]
        return self.told[0]

    def step(self, response: str) -> Step:
        self.told.append(response)
        if response == "hang":
            time.sleep(60)
        if response == "die":
            os._exit(3)
        if response == "raise":
            raise RuntimeError("no such luck")
        if response == "pid":
            return Step(str(os.getpid()))
        if response == "cpus":
            return Step(str(len(os.sched_getaffinity(0))))
        is_cut = response == "truncated"
        return Step(" ".join(self.told), reward=float(len(self.told)), done=response == "end", truncated=is_cut)


class Processes:
    """Starts processes and raises what ends programs. No `close`."""

    def reset(self, prompt: Prompt, seed: int) -> None:
        """Nothing."""

    def step(self, response: str) -> Step:
        if response == "KeyboardInterrupt":
            raise KeyboardInterrupt
        if response == "GeneratorExit":
            raise GeneratorExit
        if response == "SystemExit":
            sys.exit("a\x1b[31m\rb\nc")
        if response == "fork":
            return Step("parent" if os.fork() else "child")
        while response == "spin":
            pass
        if response == "session":
            return Step(str(subprocess.Popen(["sleep", "300"], start_new_session=True).pid))
        if response == "orphan":
            orphan = "setsid sleep 300 > /dev/null 2>&1 & echo $!"
            return Step(subprocess.run(["sh", "-c", orphan], capture_output=True, text=True, check=True).stdout)
        if response == "same session":
            return Step(str(subprocess.Popen(["sleep", "300"]).pid))
        return Step(str(os.getpid()))


_KEPT: list[bytes] = []


class Keeps(Environment):
    """Keeps memory for good: 700 MiB each time, or all that there is."""

    def reset(self, prompt: Prompt, seed: int) -> str:
        _KEPT.append(bytes(700 << 20))
        return "kept"

    def step(self, response: str) -> Step:
        while True:
            _KEPT.append(bytes(700 << 20))
            if response != "all":
                return Step("kept")


class KeepingTools:
    def keep(self) -> str:
        """Keeps memory for good."""
        _KEPT.append(bytes(700 << 20))
        return "kept"


class Slow(Environment):
    """Takes its time."""

    def reset(self, prompt: Prompt, seed: int) -> str:
        time.sleep(0.4)
        return "slow"


class Closing(Environment):
    """Raises, and notes its end in a file."""

    def __init__(self, path: str):
        self.path = path

    def step(self, response: str) -> Step:
        raise RuntimeError(response + "\ud800")

    def close(self) -> None:
        with open(self.path, "a") as file:
            file.write("closed ")


class BadClose(Environment):
    """Every turn is the last one, and says how `close` fails; the first `reset` of all fails."""

    def __init__(self, path: str):
        self.path, self.turn = path, ""

    def reset(self, prompt: Prompt, seed: int) -> str:
        with open(self.path, "a+") as file:
            is_first = not file.tell()
            file.write("reset ")
        if is_first:
            raise OSError("the service is not there yet")
        return "now"

    def step(self, response: str) -> Step:
        self.turn = response
        return Step(done=True)

    def close(self) -> None:
        if self.turn == "raise":
            raise RuntimeError("it is stuck")
        if self.turn == "hang":
            time.sleep(60)


class Dice(Environment):
    """Not a function of its seed."""

    def step(self, response: str) -> Step:
        return Step(str(random.random()))


_COUNT = itertools.count()


class Counts(Environment):
    """Every reset is another one."""

    def reset(self, prompt: Prompt, seed: int) -> str:
        return str(next(_COUNT))

    def step(self, response: str) -> Step:
        return Step("")


class Gym:
    """Gymnasium's methods."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, object] | None = None
    ) -> tuple[str, dict[str, object]]:
        assert options is not None
        return f"{options['prompt']} {seed}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        return f"did {action}", 0.5, action == "right", action in ("right", "late"), {}


class Echo:
    """Tools of other kinds."""

    @staticmethod
    def echo(text: str) -> str:
        """
        Returns its argument.

        Args:
            text: Any.
        """
        return text

    def loop(self) -> list[object]:
        """Returns what is no JSON."""
        value: list[object] = []
        value.append(value)
        return value


class Shop:
    """Tools; `score` is the reward."""

    def __init__(self, price: int = 3):
        self.price, self.bought = price, 0

    def buy(self, count: int) -> dict[str, int]:
        """
        Buys some.

        Args:
            count: How many.
        """
        if count > 9:
            raise ValueError("sold out")
        self.bought += count
        return {"cost": count * self.price}

    def score(self, response: str) -> float:
        return float(self.bought)


class Untyped:
    def buy(self, count):
        """Buys."""
