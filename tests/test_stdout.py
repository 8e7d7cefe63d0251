"""What others print past Python does not get between the lines of a command."""

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, os
from delta.stdout import others_to_stderr
print("before")
with others_to_stderr():
    ctypes.CDLL(None).printf(b"from C\\n")
    os.write(1, b"to the descriptor\\n")
print("after")
"""


def test_what_others_print_goes_to_the_standard_error():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["before", "after"]
    assert sorted(done.stderr.splitlines()) == ["from C", "to the descriptor"]


def test_the_standard_output_is_back_after_an_error():
    program = PROGRAM.replace("    os.write", "    raise SystemExit\n    os.write")
    done = subprocess.run([sys.executable, "-c", program + "\n"], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("before\n", "from C\n")


@pytest.mark.parametrize("word", ["from C", "to the descriptor"])
def test_without_it_they_would_be_there(word):
    program = PROGRAM.replace("with others_to_stderr():", "if True:")
    assert word in subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
