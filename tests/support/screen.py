"""A terminal without a window: runs a command under a pty and keeps what its screen shows, as `tmux
capture-pane -p` prints it.

Knows the codes that rich writes: colours (left out), cursor up, column, home and visibility, erasing lines
and the screen.
"""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

CODE = re.compile(r"\x1b\[(\?)?(\d*)(?:;[\d;]*)?([A-Za-z])|\x1b[()][A-Z0-9]|\x1b\][^\x07]*\x07")


class Screen:
    """The rows of a terminal. `rows` has all that were ever there, of which the last `height` are on the
    screen."""

    def __init__(self, width: int = 80, height: int = 24):
        self.width = width
        self.height = height
        self.rows: list[str] = [""]
        self.row = self.column = 0
        self.cursor = True
        self._rest = ""

    def feed(self, text: str) -> None:
        """Takes what a program wrote."""
        text = self._rest + text
        self._rest = ""
        while text:
            if text[0] == "\x1b":
                code = CODE.match(text)
                if code is None:
                    self._rest = text  # its end is still to come
                    return
                self._obey(code)
                text = text[code.end() :]
                continue
            self._put(text[0])
            text = text[1:]

    def text(self) -> str:
        """Returns the screen, without spaces at the ends of rows and empty rows at its end."""
        return "\n".join(row.rstrip() for row in self.rows[-self.height :]).rstrip()

    def _obey(self, code: re.Match[str]) -> None:
        private = code[1]
        number = int(code[2] or 1)
        letter = code[3]
        if private and letter in "hl":
            self.cursor = letter == "h" if code[2] == "25" else self.cursor
        elif letter == "A":
            self.row = max(0, self.row - number)
        elif letter == "G":
            self.column = number - 1
        elif letter == "K":
            self.rows[self.row] = "" if code[2] == "2" else self.rows[self.row][: self.column]
        elif letter == "H":
            self.row = max(0, len(self.rows) - self.height)
            self.column = 0
        elif letter == "J":
            del self.rows[self.row + 1 :]
            self.rows[self.row] = ""

    def _put(self, character: str) -> None:
        if character == "\r":
            self.column = 0
        elif character == "\n" or (character >= " " and self.column >= self.width):
            self.row = self.row + 1
            self.column = 0
            while len(self.rows) <= self.row:
                self.rows.append("")
        if character >= " ":
            row = self.rows[self.row].ljust(self.column)
            self.rows[self.row] = row[: self.column] + character + row[self.column + 1 :]
            self.column += 1


class Terminal:
    """A command under a pty of its own. `see` is called with the screen whenever that may have changed."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        width: int = 80,
        height: int = 24,
    ):
        self.screen = Screen(width, height)
        self.written = ""  # all of it, with its codes
        self.began = time.monotonic()
        self.process, self._descriptor = pty.fork()
        if not self.process:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # which a job in the background would ignore
            os.chdir(folder)
            os.execvpe(command[0], list(command), dict(environment))
        self.resize(width, height)
        self.settings = termios.tcgetattr(self._descriptor)

    @property
    def seconds(self) -> float:
        """Since the command was started."""
        return time.monotonic() - self.began

    def resize(self, width: int, height: int) -> None:
        """Sets the size of the window, as a person does with the mouse."""
        self.screen.width = width
        self.screen.height = height
        fcntl.ioctl(self._descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def press(self, keys: bytes) -> None:
        os.write(self._descriptor, keys)

    def run(self, see: Callable[[Terminal], None], seconds: float = 120) -> int:
        """Follows the command to its end, and kills it after some seconds. Returns its exit code, -n when
        signal n ended it."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a read may end within a character
        while select.select([self._descriptor], [], [], max(0.0, self.began + seconds - time.monotonic()))[0]:
            try:
                written = os.read(self._descriptor, 65536)
            except OSError:  # Linux says so when the last process has closed the terminal
                break
            if not written:
                break
            text = decoder.decode(written)
            self.written += text
            self.screen.feed(text)
            see(self)
        else:
            os.kill(self.process, signal.SIGKILL)
        self.restored = termios.tcgetattr(self._descriptor) == self.settings
        os.close(self._descriptor)
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
