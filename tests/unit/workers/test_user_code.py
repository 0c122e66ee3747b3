"""Where a user's modules are found."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_tlt.errors import UserCodeError
from megatron_tlt.workers.user_code import load_object


@pytest.mark.parametrize("where", ["of_a_user", "below/of_a_user.py"])
def test_a_module_of_the_working_directory_and_one_beside_a_file_are_found_behind_installed_ones(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = (tmp_path / where).parent
    folder.mkdir(exist_ok=True)
    (folder / "of_a_user.py").write_text("import colorsys\nfrom beside_of_a_user import value")
    (folder / "beside_of_a_user.py").write_text(f"value = {where!r}")
    (folder / "colorsys.py").write_text("an installed module is taken before this one")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("of_a_user", "beside_of_a_user", "colorsys"):
        sys.modules.pop(name, None)
    assert load_object(f"{where}:value") == where


def test_a_module_that_is_not_there_is_refused_with_the_nearest_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reward_of_a_user.py").write_text("import rewards_of_a_user")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(UserCodeError, match=r"'rewards_of_a_user'; did you mean reward_of_a_user\.py\?$"):
        load_object("rewards_of_a_user:reward")
    with pytest.raises(UserCodeError, match=r"'rewards_of_a_user' \(.*reward_of_a_user\.py:1\)$"):
        load_object("reward_of_a_user:reward")


def test_a_file_whose_helper_would_be_another_folder_s_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "helper_of_a_user.py").write_text(f"value = {name!r}")
        (tmp_path / name / "reward.py").write_text("from helper_of_a_user import value")
    assert load_object(f"{tmp_path}/one/reward.py:value") == "one"
    with pytest.raises(UserCodeError, match=rf"^{tmp_path}/two/helper_of_a_user\.py: {tmp_path}/one/.* rename one"):
        load_object(f"{tmp_path}/two/reward.py:value")
    del sys.modules["helper_of_a_user"]
