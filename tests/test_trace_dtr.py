"""Logs of DTR: each instruction by hand, random logs against a naive reading, and errors with their line."""

import gzip
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from delta.errors import TraceError
from delta.trace import Evictable, read, summary, write
from delta.trace.events import Backward, Constant, Event, Free, Op, Result
from delta.trace.inventory import Inventory

Line = dict[str, Any]
START = {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "START"}
BACKWARD = {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "BACKWARD"}


def constant(name: str, nbytes: int) -> list[Line]:
    return [{"INSTRUCTION": "CONSTANT", "NAME": name}, memory(name, nbytes)]


def memory(name: str, nbytes: int) -> Line:
    return {"INSTRUCTION": "MEMORY", "NAME": name, "MEMORY": str(nbytes)}


def call(args: str, results: dict[str, tuple[int, int]], time: int = 7) -> list[Line]:
    """`results`: name -> its bytes and the argument it is a view of, or -1."""
    line = {"INSTRUCTION": "CALL", "NAME": "op", "ARGS": [*args], "RESULT": [*results], "TIME": str(time)}
    lines = [line]
    for name, (nbytes, alias) in results.items():
        lines += [memory(name, nbytes), {"INSTRUCTION": "ALIAS", "NAME": name, "ALIAS": str(alias)}]
    return lines


def mutate(args: str, positions: Iterable[int], time: int = 9) -> Line:
    return {"INSTRUCTION": "MUTATE", "NAME": "op_", "ARGS": [*args], "MUTATE": [*positions], "TIME": str(time)}


def copy(dst: str, src: str, instruction: str = "COPY") -> Line:
    return {"INSTRUCTION": instruction, "DST": dst, "SRC": src}


def release(name: str) -> Line:
    return {"INSTRUCTION": "RELEASE", "NAME": name}


def log(tmp_path: Path, *lines: Line | list[Line]) -> Path:
    flat = [one for line in lines for one in (line if isinstance(line, list) else [line])]
    path = tmp_path / "net.log"
    path.write_text("".join(json.dumps(line) + "\n" for line in flat))
    return path


def events(tmp_path: Path, *lines: Line | list[Line]) -> tuple[Event, ...]:
    return read(log(tmp_path, START, *lines)).events


NEW = (8, -1)


# --- instructions -----------------------------------------------------------------------------------------------------


def test_a_step_by_hand(tmp_path: Path) -> None:
    path = log(
        tmp_path,
        START,
        constant("w", 100),
        call("w", {"a": (40, -1)}),
        release("w"),
        BACKWARD,
        call("a", {"b": (20, -1), "c": (30, -1)}, time=11),
        release("a"),
        release("c"),
    )
    trace = read(path)
    assert (trace.name, trace.evictable, trace.device, trace.link) == ("net", Evictable.ALL, "", None)
    assert trace.events == (
        Constant(0, 100),
        Op("op", (0,), (1,), (40,), 7),
        Backward(),
        Op("op", (1,), (2, 3), (20, 30), 11),
        Free(1),
        Free(3),
        Result(2),
    )
    assert (summary(trace).peak_bytes, trace.base_ns, trace.constant_bytes) == (190, 18, 100)


def test_logs_are_recognised_whatever_they_are_called(tmp_path: Path) -> None:
    path = log(tmp_path, START, constant("w", 1))
    packed = tmp_path / "net.log.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read(packed) == read(path)
    own = tmp_path / "own.jsonl"
    write(read(path), own)
    assert read(own) == read(path)


def test_views_are_their_storage(tmp_path: Path) -> None:
    found = events(
        tmp_path,
        constant("w", 1),
        call("w", {"a": NEW}),
        call("a", {"b": (8, 0), "c": (8, 0)}),
        release("a"),
        call("wb", {"d": NEW, "e": (8, 1)}),
        *(release(name) for name in "bce"),
    )
    assert found[2:] == (Op("op", (1,), (), (), 7), Op("op", (0, 1), (2,), (8,), 7), Free(1), Result(2))


def test_a_storage_that_is_read_twice_is_one_input(tmp_path: Path) -> None:
    assert events(tmp_path, constant("w", 1), call("ww", {"a": NEW}))[1] == Op("op", (0,), (1,), (8,), 7)


def test_mutation_makes_a_storage_under_the_same_name(tmp_path: Path) -> None:
    found = events(
        tmp_path, constant("w", 5), call("w", {"a": NEW}), copy("b", "a"), mutate("wa", [1]), mutate("aw", [0, 1])
    )
    assert found[2:] == (
        Op("op_", (0, 1), (2,), (8,), 9),  # b still is the old one
        Op("op_", (2, 0), (3, 4), (8, 5), 9),
        Free(2),  # and the constant is not freed
        Result(4),
        Result(3),
        Result(1),
    )


def test_copies_are_further_names(tmp_path: Path) -> None:
    found = events(
        tmp_path,
        *(constant("w", 5), call("w", {"a": NEW}), call("w", {"b": NEW}), copy("c", "a"), release("a")),
        *(copy("b", "c", "COPY_FROM"), copy("b", "b", "COPY_FROM"), release("c"), release("b")),
    )
    assert found[3:] == (Free(2), Free(1))


def test_unknown_releases_and_remarks_are_passed_over(tmp_path: Path) -> None:
    remark = {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "UPDATE"}
    found = events(tmp_path, release("x"), constant("w", 5), remark, release("w"), release("w"), START)
    assert found == (Constant(0, 5),)


# --- before START -----------------------------------------------------------------------------------------------------


def test_what_building_the_model_leaves_is_constant(tmp_path: Path) -> None:
    path = log(
        tmp_path,
        *(constant("s", 3), call("s", {"w": (50, -1), "x": (60, -1)}), mutate("w", [0]), copy("v", "w")),
        *(release("s"), release("w"), release("x"), BACKWARD),
        *(START, call("v", {"a": NEW}), release("v"), mutate("a", [0])),
    )
    assert read(path).events == (
        Constant(3, 50),
        Op("op", (3,), (4,), (8,), 7),
        Op("op_", (4,), (5,), (8,), 9),
        Free(4),
        Result(5),
    )


def test_a_log_without_start_is_a_step(tmp_path: Path) -> None:
    path = log(tmp_path, constant("w", 1), call("w", {"a": NEW}))
    assert read(path).events == (Constant(0, 1), Op("op", (0,), (1,), (8,), 7), Result(1))


# --- random logs ------------------------------------------------------------------------------------------------------


@st.composite
def logs(draw: st.DrawFn) -> list[Line]:
    """Any instructions on any names."""
    lines = [START, *constant("n0", draw(st.integers(0, 99)))]
    names, count = ["n0"], 1
    for _ in range(draw(st.integers(0, 30))):
        some = st.sampled_from(names) if names else st.nothing()
        kind = draw(st.sampled_from(["call", "call", "mutate", "copy", "copy from", "release", "constant"]))
        fresh = f"n{count}"
        args = draw(st.lists(some, max_size=3)) if names else []
        if kind == "constant":
            lines += constant(fresh, draw(st.integers(0, 99)))
            names.append(fresh)
        elif kind == "call":
            results = {
                f"{fresh}.{n}": (draw(st.integers(0, 99)), draw(st.integers(-1, len(args) - 1)))
                for n in range(draw(st.integers(0, 3)))
            }
            lines += call("", results, draw(st.integers(0, 99)))
            lines[-2 * len(results) - 1]["ARGS"] = args
            names += results
        elif kind == "mutate":
            one = mutate("", draw(st.lists(st.integers(0, len(args) - 1), unique=True)) if args else [])
            lines.append(one | {"ARGS": args})
        elif kind == "release":
            lines.append(release(gone := draw(st.sampled_from([*names, "nobody"]))))
            names = [name for name in names if name != gone]
        elif names:
            dst = draw(some) if kind == "copy from" else fresh
            lines.append(copy(dst, draw(some), "COPY" if kind == "copy" else "COPY_FROM"))
            names += [dst] * (kind == "copy")
        count += 1
    return lines


def naive(lines: list[Line]) -> tuple[int, int, int]:
    """Peak, time and what is left: every name has an object, and what no name has any more is gone."""
    names: dict[str, list[int]] = {}  # name -> its storage, as an object that holds its bytes
    constants: list[list[int]] = []
    peak = time = 0

    def live(*more: list[int]) -> int:
        objects = {id(storage): storage[0] for storage in (*names.values(), *constants, *more)}
        return sum(objects.values())

    for number, line in enumerate(lines):
        match line["INSTRUCTION"]:
            case "CONSTANT":
                names[line["NAME"]] = storage = [int(lines[number + 1]["MEMORY"])]
                constants.append(storage)
            case "CALL":
                args = [names[name] for name in line["ARGS"]]
                for offset, result in enumerate(line["RESULT"]):
                    alias = int(lines[number + 2 + 2 * offset]["ALIAS"])
                    names[result] = [int(lines[number + 1 + 2 * offset]["MEMORY"])] if alias < 0 else args[alias]
                time += int(line["TIME"])
            case "MUTATE":
                old = [names[name] for name in line["ARGS"]]
                new = {line["ARGS"][position]: [*names[line["ARGS"][position]]] for position in line["MUTATE"]}
                made = [[*old[position]] for position in line["MUTATE"]]
                peak = max(peak, live(*made))
                names |= new
                time += int(line["TIME"])
            case "COPY" | "COPY_FROM":
                names[line["DST"]] = names[line["SRC"]]
            case "RELEASE":
                names.pop(line["NAME"], None)
        peak = max(peak, live())
    left = {id(storage) for storage in names.values()} - {id(storage) for storage in constants}
    return peak, time, len(left)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=logs())
def test_random_logs_are_read_as_a_naive_reader_does(tmp_path: Path, lines: list[Line]) -> None:
    trace = read(log(tmp_path, lines))
    inventory = Inventory()
    for event in trace.events:
        inventory.take(event)
    results = [event for event in trace.events if isinstance(event, Result)]
    assert (inventory.peak_bytes, trace.base_ns, len(results)) == naive(lines)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([{"INSTRUCTION": "JUMP"}], "line 4: INSTRUCTION is 'JUMP'; expected here is one of ANNOTATE, CALL, CONSTANT"),
        ([{"NAME": "JUMP"}], "line 4: INSTRUCTION is None"),
        ([memory("w", 1)], "line 4: INSTRUCTION is 'MEMORY'"),
        (constant("w", 1), "line 5: 'w' is defined twice"),
        (constant("x", -1), "line 5: MEMORY is '-1', must be a whole number from 0 on"),
        ([constant("x", 1)[0]], "cut off after line 4: MEMORY of 'x' is missing"),
        ([constant("x", 1)[0], memory("y", 1)], "line 5: MEMORY of 'y'; expected is MEMORY of 'x'"),
        ([constant("x", 1)[0], release("x")], "line 5: RELEASE of 'x'; expected is MEMORY of 'x'"),
        (call("q", {}), "line 4: 'q' refers to no storage: no line before defines it, or it was released"),
        ([release("w"), *call("w", {})], "line 5: 'w' refers to no storage"),
        (call("w", {"a": (-8, -1)}), "line 5: MEMORY is '-8'"),
        (call("w", {"a": (8, 1)}), "line 6: ALIAS is '1', must be a whole number from -1 on and below 1"),
        (call("w", {"a": (8, -2)}), "line 6: ALIAS is '-2'"),
        (call("w", {"a": NEW})[:2], "cut off after line 5: ALIAS of 'a' is missing"),
        (call("w", {"w": NEW}), "line 6: 'w' is defined twice"),
        (call("w", {}, time=-1), "line 4: TIME is '-1', must be a whole number from 0 on"),
        ([call("w", {})[0] | {"TIME": 1.5}], "line 4: TIME is 1.5"),
        ([call("w", {})[0] | {"TIME": "fast"}], "line 4: TIME is 'fast'"),
        ([call("w", {})[0] | {"ARGS": "w"}], "line 4: ARGS is 'w', must be a list"),
        ([call("w", {})[0] | {"RESULT": [1]}], "line 4: RESULT is [1], must be a list of texts"),
        ([call("w", {})[0] | {"NAME": None}], "line 4: NAME is None, must be a text"),
        ([mutate("w", [1])], "line 4: MUTATE is 1, must be a whole number from 0 on and below 1"),
        ([mutate("q", [0])], "line 4: 'q' refers to no storage"),
        ([copy("a", "q")], "line 4: 'q' refers to no storage"),
        ([copy("w", "w")], "line 4: 'w' is defined twice"),
        ([copy("q", "w", "COPY_FROM")], "line 4: 'q' refers to no storage"),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, lines: list[Line], said: str) -> None:
    path = log(tmp_path, START, constant("w", 1), lines)
    with pytest.raises(TraceError, match=re.escape(f"trace {str(path)!r}") + "(, |: )" + re.escape(said)):
        read(path)


def test_a_log_cut_off_in_a_line_is_refused(tmp_path: Path) -> None:
    path = log(tmp_path, START, constant("w", 1))
    path.write_text(path.read_text()[:-5])
    with pytest.raises(TraceError, match="line 3: not JSON"):
        read(path)
