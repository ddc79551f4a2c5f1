"""Which commit a working directory is at, from the files of git alone."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from nvalchemi_lightning.checkpoint.git import commit_of

ONE, TWO = "1" * 40, "2" * 40


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a working tree that is inside no other."""
    folder = tmp_path / "tree"
    write(folder / ".git/HEAD", "ref: refs/heads/main\n")
    (folder / "inside/deep").mkdir(parents=True)
    return folder


def test_a_branch(tree: Path) -> None:
    write(tree / ".git/refs/heads/main", f"{ONE}\n")
    assert commit_of(tree) == ONE
    assert commit_of(tree / "inside/deep") == ONE


def test_the_working_directory_itself(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tree / ".git/refs/heads/main", f"{ONE}\n")
    monkeypatch.chdir(tree / "inside")
    assert commit_of(Path()) == ONE


def test_a_packed_branch(tree: Path) -> None:
    packed = f"# pack-refs with: peeled\n{TWO} refs/heads/main-2\n{ONE} refs/heads/main\n^{TWO}\n"
    write(tree / ".git/packed-refs", packed)
    assert commit_of(tree) == ONE


def test_a_loose_branch_counts_more_than_a_packed_one(tree: Path) -> None:
    write(tree / ".git/packed-refs", f"{ONE} refs/heads/main\n")
    write(tree / ".git/refs/heads/main", f"{TWO}\n")
    assert commit_of(tree) == TWO


def test_a_detached_head(tree: Path) -> None:
    write(tree / ".git/HEAD", f"{'a' * 64}\n")
    assert commit_of(tree) == "a" * 64


@pytest.mark.parametrize("pointer", ["gitdir: ../tree/.git/worktrees/other\n", "gitdir: {absolute}\n"])
def test_a_linked_working_tree(tree: Path, pointer: str) -> None:
    own = tree / ".git/worktrees/other"
    write(own / "HEAD", "ref: refs/heads/other\n")
    write(own / "commondir", "../..\n")
    write(tree / ".git/refs/heads/other", f"{TWO}\n")
    write(tree.parent / "other/.git", pointer.format(absolute=own))
    assert commit_of(tree.parent / "other") == TWO


@pytest.mark.parametrize(
    "head",
    ["ref: refs/heads/unborn\n", "ref: HEAD\n", "nonsense\n", f"{ONE}0\n", "\x00\xff", "ref: ../../outside\n"],
)
def test_no_commit_to_be_told(tree: Path, head: str) -> None:
    write(tree / ".git/HEAD", head)
    write(tree.parent / "outside", "a secret\n")
    assert commit_of(tree) is None


def test_no_repository(tmp_path: Path) -> None:
    assert commit_of(tmp_path) is None


def test_files_that_cannot_be_read(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> str:
        raise PermissionError("no")

    monkeypatch.setattr(Path, "read_text", refuse)
    assert commit_of(tree) is None


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git_says_the_same(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        identity = ("-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false")
        done = subprocess.run(["git", *identity, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "--quiet", "--initial-branch=main")
    for _ in range(2):
        git("commit", "--quiet", "--allow-empty", "--message=m")
        assert commit_of(tmp_path) == git("rev-parse", "HEAD")
        git("pack-refs", "--all")
        assert commit_of(tmp_path) == git("rev-parse", "HEAD")
    git("worktree", "add", "--quiet", "linked", "HEAD~1")
    assert commit_of(tmp_path / "linked") == git("rev-parse", "HEAD~1")
