"""What the docs and our own messages say to type is what coslice takes."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from coslice.cli.main import app
from coslice.cli.security import make_token
from coslice.security.tokens import create_secret

ROOT = Path(__file__).parents[2]
ROOT_COMMAND = typer.main.get_command(app)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> Iterator[str]:
    """The commands of its code blocks, without comments, prompts of others and what is left out."""
    text = re.sub(r"\\\n\s*", " ", page.read_text()).replace("…", "")
    for block in re.findall(r"```\w*\n(.*?)```", text, flags=re.S):
        for line in block.splitlines():
            for found in re.finditer(r"(?:^|[|(]\s*|\w+=\S+ )coslice ([a-z][^|;&)#]*)", line):
                yield found[1]


def parse(words: list[str]) -> None:
    command = ROOT_COMMAND
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    command.make_context("coslice", list(words))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_the_commands_of_code_blocks_are_taken(page: Path) -> None:
    for line in blocks(page):
        try:
            parse(shlex.split(re.split(r"   ", line)[0]))
        except Exception as error:
            raise AssertionError(f"coslice {line}: {error}") from error


def test_every_way_to_make_a_token_that_we_tell_makes_one(tmp_path: Path) -> None:
    create_secret(tmp_path / "secret")
    files = [file for folder in ("docs", "deploy", "src") for file in (ROOT / folder).rglob("*.*")]
    told = [
        words.split()
        for file in files
        if file.suffix in (".md", ".py", ".html", ".txt", ".tpl", ".yaml", ".sbatch")
        for words in re.findall(r"coslice token create ([^`)<]*)", file.read_text())
    ]
    assert len(told) > 5
    for words in told:
        name = "" if words[0].startswith("--") else "a"
        role = words[words.index("--role") + 1] if "--role" in words else "job"
        assert make_token(name, secret=tmp_path / "secret", role=role, ttl="1h"), words
