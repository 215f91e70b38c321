"""Reading shell scripts: the words are those that a shell makes. bash itself and shlex are the references."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.migrate.shell import Variables, read_script
from tests.support.programs import captured

# `show` is a command of these tests that prints its words; bash has it as a function.
SHOW = 'show() { printf "<%s>" "$@"; echo; }\n'
SCRIPTS = {
    "quotes": r"""show 'single $A' "double \"q\" \$A \x" plain\ space it\'s "" ''""",
    "continuation": "show --a 1 \\\n  --b 2 \\\n\n show c\\\nd",
    "comments": "show a # b\nshow c#d '#e'\n# show f\nshow g",
    "variables": 'A=1; B="x y"; export C=$A$B\nshow $A "$B" $B ${A} pre${A}post "$C" $C',
    "defaults": (
        'show ${D:-five} "${D:-"a b"}" ${D-x}; D=6; show ${D:-five} "${D:-no}"; show ${F:=7} $F; E=; show'
        ' "${E-x}" ${E:-$D}'
    ),
    "arrays": (
        'A=(--one 1 # first\n  --two "a b")\nA+=(--three)\nshow "${A[@]}"; show ${A[@]}; show ${A[1]}'
        ' "${A[*]}"; show "pre${A[0]}"'
    ),
    "plus": "A=x; A+=y; show $A",
    "ansi": r"""show $'a\nb' $'it\'s'"z" """,
    "heredoc": (
        "X=5\nread -r -d '' CMD <<EOF\nmodule.name \\\n  --path ./x/$X \\\n  --cost \\$5 --q \"z"
        ' w"\nEOF\nshow $CMD\n'
    ),
    "quoted heredoc": "X=5\nread -r -d '' CMD <<'EOF'\n--path $X\nEOF\nshow $CMD",
    "dashed heredoc": "cat <<-EOF >/dev/null\n\tshow no\n\tEOF\nshow yes",
    "redirections": "show a >/dev/null 2>&1; show b 2>/dev/null; show c &>/dev/null; show d </dev/null",
    "splitting": 'A=\' x  y \'; show a$A.b; show $A; show "$A"; E=; show $E end "$E"',
    "grammar": (
        "if [ 1 = 1 ]; then\n  show a\nfi\nfor x in 1 2; do :; done; { show b; } && ! show c; (show d)"
    ),
    "windows": "show a \\\r\n  b\r\nshow c\r\n",
}


def words(script: str) -> str:
    shown = (command.words[1:] for command in read_script(script).commands if command.words[0] == "show")
    return "".join("".join(f"<{word}>" for word in found) + "\n" if found else "<>\n" for found in shown)


@pytest.mark.parametrize("name", SCRIPTS)
def test_words_are_those_of_bash(name: str) -> None:
    bash = shutil.which("bash")
    assert bash
    script = SCRIPTS[name]
    done = captured([bash, "-c", SHOW + script.replace("\r\n", "\n")], timeout=20)
    # bash sends the first and the third away
    expected = "<a>\n<b>\n<c>\n<d>\n" if name == "redirections" else done.stdout
    assert done.stdout and words(script) == expected


@given(
    st.lists(
        st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\x00\r"), max_size=12),
        min_size=1,
        max_size=6,
    )
)
def test_quoted_words_come_back(parts: list[str]) -> None:
    (command,) = read_script("run " + shlex.join(parts)).commands
    assert list(command.words) == ["run", *parts]


@given(st.text("ab -=\"'\\\t", max_size=20))
def test_quotes_and_backslashes_as_shlex_reads_them(text: str) -> None:
    try:
        expected = shlex.split("run " + text)
    except ValueError:
        with pytest.raises(ValueError, match=r"never closed|ends in a backslash"):
            read_script("run " + text)
        return
    (command,) = read_script("run " + text).commands
    assert list(command.words) == expected


def test_what_a_script_does_not_say_stays_visible() -> None:
    script = read_script(
        'run $A "x$B" ${C} ${D?no} $(date +%s) `id -u` $1 "$((N * 2))" $$; A=a.bin; run ${A%.bin} $((1 +'
        " 1))\n"
    )
    assert [command.words for command in script.commands if command.words[0] == "run"] == [
        ("run", "$A", "x$B", "$C", "${D?no}", "$(date +%s)", "`id -u`", "$1", "$((N * 2))", "${$}"),
        ("run", "${A%.bin}", "$((1 + 1))"),
    ]


def test_an_assignment_in_a_condition_counts_only_for_an_unset_variable() -> None:
    text = 'A=1\nif [ -n "$X" ]; then\n  A=2\n  B=3\nfi\n[ -z "$A" ] && A=4\nrun $A $B\n'
    script = read_script(text)
    assert script.commands[-1].words == ("run", "1", "3")
    assert [remark.line for remark in script.remarks] == [3, 6]
    assert "A is set again in a condition or a loop" in script.remarks[0].text


def test_a_loop_is_read_once_and_an_included_file_not_at_all() -> None:
    script = read_script("source env.sh\nfor LR in 1e-6 5e-7; do\n  train --lr $LR\ndone\n")
    assert ("train", "--lr", "1e-6") in [command.words for command in script.commands]
    assert [remark.text for remark in script.remarks] == [
        "source env.sh is not read: what it sets is unknown here",
        "the loop over LR is read once, with LR=1e-6",
    ]


def test_nothing_is_executed(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    read_script(
        f'touch {marker}\nX=$(touch {marker})\nrun `touch {marker}` "$(touch {marker})"'
        ' $((__import__("os").getpid()))\n'
    )
    assert not marker.exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a\nrun 'x", "line 2 of the script: the quote ' is never closed"),
        ('run "x', 'line 1 of the script: the quote " is never closed'),
        ("run <<EOF\nx\n", "line 1 of the script: the heredoc EOF is never closed"),
        ("run $(x", "line 1 of the script: the bracket ( is never closed"),
        ("A=(x", "line 1 of the script: the bracket ( is never closed"),
        ("run ${x", "line 1 of the script: the bracket { is never closed"),
        ("run \\", "it ends in a backslash"),
    ],
)
def test_what_is_never_closed_is_one_sentence(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told.replace("$", r"\$").replace("(", r"\(").replace("{", r"\{")):
        read_script(text)


def test_lines_are_those_of_the_script() -> None:
    script = read_script("# one\n\nA=1\nrun a \\\n  b\n\nrun c\n", Variables())
    assert [(command.words[0], command.line) for command in script.commands] == [
        ("A=1", 3),
        ("run", 4),
        ("run", 7),
    ]


@given(st.text("$ab{}()'\"\\ \n#;&|<>=-[]@*:+`!1", max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        read_script(text)
    except ValueError as error:
        assert "of the script" in str(error)
