"""Which tests `make test`, its rest and continuous integration run: together all, each shard in turn, every example."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
from collections import Counter
from itertools import chain
from pathlib import Path

import forked_python
import pytest
from contract.operations import OPERATIONS
from contract.test_generated_calls import NAMES
from selection import hash_of, is_of_shard, shard_of, spread

ROOT = Path(__file__).parents[2]
CI = ROOT / ".ci" / "run"


def collected(*arguments: str, folder: str = "tests/contract") -> list[str]:
    """The ids of the tests of a folder that pytest would run."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = ["-m", "pytest", "--collect-only", "-q", "-n", "0", *arguments, folder]
    run = forked_python.run(command, cwd=ROOT, env=environment)
    assert run.returncode == 0, run.stdout + run.stderr
    return [line for line in run.stdout.splitlines() if "::" in line]


@pytest.fixture(scope="module")
def quick() -> list[str]:
    return collected()


def test_tests_for_gpus_can_be_collected():
    """Nothing else imports them without a GPU."""
    assert len(collected(folder="tests/gpu")) > 2500


def parts(node_id: str) -> tuple[str, str]:
    found = re.fullmatch(r".*::(\w+)(?:\[(.*)\])?", node_id)
    return found[1], found[2] or ""


def test_every_test_of_the_contract_and_every_example_is_quick(quick):
    """Every example also with hazards, in all ways that there are."""
    sources = "".join(path.read_text() for path in (ROOT / "tests" / "contract").glob("test_*.py"))
    assert {parts(x)[0] for x in quick} == set(re.findall(r"^def (test_\w+)", sources, re.MULTILINE))
    hazards = [parts(x)[1] for x in quick if "test_hazards.py" in x]
    values = [parts(x) for x in quick if "test_values.py" in x]
    for example in OPERATIONS:
        with_it = [given for given in hazards if re.search(rf"(?:^|-){re.escape(example)}-(?:python|native)", given)]
        assert len(with_it) >= 2, example
        for way in ("cold-{}-python", "warm-{}-python", "warm-{}-native"):
            assert ("test_values", way.format(example)) in values
    for word in ("cold", "warm", "python", "native"):
        assert sum(word in given for given in hazards) > len(hazards) / 5


def test_generated_calls_of_every_operation_are_quick(quick):
    given = [parts(x)[1] for x in quick if "test_generated_calls.py::test_calls_are_right_or_declined" in x]
    assert sorted(x.rpartition("-")[0] for x in given) == sorted(NAMES)


@pytest.mark.slow
def test_each_test_is_quick_or_in_one_of_the_shards(quick):
    shards = [collected("--tests", "rest", "--shard", f"{number}/12") for number in range(1, 13)]
    assert Counter(chain(quick, *shards)) == Counter(collected("--tests", "all"))
    assert len(quick) < sum(map(len, shards)) / 10


@pytest.mark.parametrize("shard", ["0/2", "3/2", "2", "a/b", "-1/2", "1/0", ""])
def test_wrong_shards_are_refused(shard):
    with pytest.raises(argparse.ArgumentTypeError, match="a number from 1 to the count"):
        shard_of(shard)


def test_shards_are_of_about_one_size():
    names = [f"tests/test_{number}.py::test[{number}]" for number in range(1000)]
    for name in names:
        assert [is_of_shard(name, shard_of(f"{number}/3")) for number in (1, 2, 3)].count(True) == 1
    assert 270 < sum(is_of_shard(name, (2, 3)) for name in names) < 400


def test_hashes_stay_as_they_are():
    """Otherwise each run would choose other tests."""
    assert hash_of("test_values", "sdpa") == 12133130464717507412
    assert [is_of_shard(f"a.py::test[{number}]", (1, 2)) for number in range(4)] == [True, True, True, False]


class Parametrization:
    def __init__(self, **indices: int) -> None:
        self.indices, self.id = indices, str(indices)


def test_a_sample_has_as_many_values_as_it_can():
    calls = [Parametrization(name=name, first=first) for name in range(5) for first in range(3)]
    chosen = list(spread("test", calls, 5))
    assert {call.indices["name"] for call in chosen} == set(range(5))
    assert {call.indices["first"] for call in chosen} == set(range(3))
    assert len(list(spread("test", calls, 99))) == len(calls)
    assert [x.id for x in chosen] == [x.id for x in spread("test", calls[::-1], 5)]


# Continuous integration.


@pytest.fixture
def ci(tmp_path: Path):
    """Runs `.ci/run` with programs in place of git and make: so many commits, and exit statuses of targets."""
    if not CI.exists():
        pytest.skip("this copy of the sources has no .ci")
    folder = tmp_path / "programs"
    folder.mkdir()
    (tmp_path / ".ci").mkdir()
    shutil.copy(CI, tmp_path / ".ci" / "run")

    def program(name: str, text: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)

    def run(commits: int, **statuses: int) -> tuple[int, list[str], list[str]]:
        """The exit status, the targets that were made, and the lines that were printed."""
        program("git", f'[ "$*" = "rev-list --count HEAD" ] && echo {commits}')
        for name in ("chromium", "chromedriver"):
            program(name, "exit 0")
        cases = "".join(f"{name.replace('_', '-')}) exit {status};; " for name, status in statuses.items())
        program("make", f'echo "$*" >> {tmp_path}/made; case "$1" in {cases} esac')
        (tmp_path / "made").write_text("")
        done = subprocess.run(
            [tmp_path / ".ci" / "run"],
            env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, (tmp_path / "made").read_text().splitlines(), done.stdout.splitlines()

    return run


def test_each_shard_comes_in_turn(ci):
    made = [ci(commits)[1] for commits in range(24, 37)]
    assert made == [["test", f"test-rest SHARD={number}/12"] for number in (*range(1, 13), 1)]


def test_the_last_lines_say_what_was_not_run(ci):
    status, _, lines = ci(10)
    assert status == 0
    assert lines[-2] == "Ran: make test, and shard 11/12 of make test-rest."
    assert lines[-1].startswith("Not run: the rest of make test-rest")
    for target in re.findall(r"^(test-(?!rest|all)\S+):", (ROOT / "Makefile").read_text(), re.MULTILINE):
        assert f"make {target}" in lines[-1]


@pytest.mark.parametrize("status", [1, 2, 124, 137])
def test_failures_and_time_that_runs_out_are_red(ci, status):
    found, made, lines = ci(10, test_rest=status)
    assert found == status
    assert made == ["test", "test-rest SHARD=11/12"]
    assert lines[-2] == "Ran: make test."
    assert any("was stopped" in line for line in lines) is (status >= 124)


def test_what_make_test_finds_is_red(ci):
    found, made, lines = ci(10, test=2)
    assert found == 2
    assert made == ["test"]
    assert lines[-2] == "Ran: nothing to its end."
