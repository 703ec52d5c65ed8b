"""API keys: who may read, plan and delete.

A key is 256 random bits. The service stores only its SHA-256; random keys cannot be
guessed, so they need no slow password hash. A line of the key file, or of the setting
`keys`, is ``NAME SCOPE SHA256``:

    ci plan 5f0c...      # comments and empty lines are ignored

The scopes are nested: `plan` includes `read`, and `admin` includes `plan`.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from planner.errors import DocumentError, Problem

Scope = Literal["read", "plan", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
"""In increasing order."""
PREFIX = "planner_"
"""Prefix of every key, so that scanners for leaked secrets recognize keys."""
NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
DIGEST = re.compile(r"[0-9a-f]{64}")
HINT = "write NAME SCOPE SHA256, as `planner serve --make-key SCOPE` prints it."


@dataclass(frozen=True, slots=True)
class Key:
    """What the service stores of a key."""

    name: str
    """Name of its owner, for the log."""
    scope: Scope
    digest: str
    """SHA-256 of the key, lower-case hex."""

    def allows(self, scope: Scope) -> bool:
        """Whether the key's scope includes this one."""
        return SCOPES.index(self.scope) >= SCOPES.index(scope)

    def line(self) -> str:
        """The line that `parse` reads."""
        return f"{self.name} {self.scope} {self.digest}"


def make_key(scope: Scope, name: str) -> tuple[str, Key]:
    """A new key: the secret, which is stored nowhere, and what the service stores.

    Raises:
        DocumentError: the name has characters that a line of the file cannot have.
    """
    if not NAME.fullmatch(name):
        raise DocumentError(
            f"{name!r} cannot be the name of a key.",
            field="--key-name",
            hint="use up to 64 letters, digits and . _ @ -",
        )
    secret = PREFIX + secrets.token_urlsafe(32)
    return secret, Key(name, scope, digest_of(secret))


def digest_of(secret: str) -> str:
    """SHA-256 of a key."""
    return hashlib.sha256(secret.encode()).hexdigest()


def find(keys: tuple[Key, ...], secret: str) -> Key | None:
    """The stored key of a client's secret, in a time that does not depend on the secret."""
    digest = digest_of(secret)
    found = [key for key in keys if hmac.compare_digest(key.digest, digest)]
    return found[0] if found else None


def read_keys(path: Path) -> tuple[Key, ...]:
    """The keys in a file.

    Raises:
        DocumentError: the file cannot be read, has a wrong line, or has no key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DocumentError(
            f"cannot be read: {error}.",
            field=str(path),
            hint="give a readable text file.",
        ) from None
    keys = parse(text, where=str(path))
    if not keys:
        raise DocumentError("has no key.", field=str(path), hint=HINT)
    return keys


def keys_of(file: str, lines: str) -> tuple[Key, ...]:
    """The keys of the settings `keys_file` and `keys`, either of which may be empty."""
    return (*(read_keys(Path(file)) if file else ()), *parse(lines, where="keys"))


def parse(text: str, *, where: str) -> tuple[Key, ...]:
    """The keys in a text, one per line.

    Raises:
        DocumentError: one problem per wrong line, by its number.
    """
    keys, problems = [], []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        wrong = _mistake(words)
        if wrong:  # never report the line itself: it may contain the secret
            problems.append(Problem(f"{where}: line {number}", wrong, HINT))
        else:
            keys.append(_key(*words))
    problems += [
        Problem(where, f"has two keys named {name!r}.", "give each key its own name.")
        for name in _doubled(keys)
    ]
    if problems:
        raise DocumentError("", problems=tuple(problems))
    return tuple(keys)


def _mistake(words: list[str]) -> str:
    if len(words) != 3:
        return f"has {len(words)} words instead of 3."
    name, scope, digest = words
    if not NAME.fullmatch(name):
        return "does not start with the name of a key."
    if scope not in SCOPES:
        return f"has none of the scopes {', '.join(SCOPES)} as its second word."
    return (
        ""
        if DIGEST.fullmatch(digest)
        else "has no SHA-256 in lower-case hex as its third word."
    )


def _key(name: str, scope: str, digest: str) -> Key:
    return Key(name, next(each for each in SCOPES if each == scope), digest)


def _doubled(keys: list[Key]) -> list[str]:
    names = [key.name for key in keys]
    return sorted({name for name in names if names.count(name) > 1})
