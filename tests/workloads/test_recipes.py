"""Recipes: integers decide, a digest guards, and bundled files are what they were."""

from pathlib import Path

import pytest

from dualtrack.facts.digests import sha256_bytes
from dualtrack.facts.errors import FrozenInputError
from dualtrack.workloads.digits import DigitsDataset
from dualtrack.workloads.recipes import mix, read_bundled, recipe_digest, verify_digest


def test_mix_gives_the_published_splitmix64_sequence() -> None:
    # first outputs for seed 1234567, as printed by the reference implementation at https://prng.di.unimi.it/splitmix64.c
    assert [mix(1234567, index) for index in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_a_dataset_that_augments_has_no_recipe_digest() -> None:
    with pytest.raises(ValueError, match="augment=False"):
        recipe_digest(DigitsDataset("train"))


def test_a_recipe_digest_covers_the_length_and_each_sample() -> None:
    class Numbers:
        augment = False

        def __init__(self, values: list[float]) -> None:
            self.values = values

        def __len__(self) -> int:
            return len(self.values)

        def __getitem__(self, index: int) -> float:
            return self.values[index]

    same = recipe_digest(Numbers([0.0, 1.0]))
    assert same == recipe_digest(Numbers([0.0, 1.0]))
    assert (
        len(
            {
                same,
                recipe_digest(Numbers([0.0, 1.5])),
                recipe_digest(Numbers([0.0, -1.0])),
                recipe_digest(Numbers([0.0, 1.0, 2.0])),
            }
        )
        == 4
    )
    assert recipe_digest(Numbers([0.0, 1.0, 2.0]), 2) != recipe_digest(Numbers([0.0, 1.0]), 2)


def test_another_digest_than_the_frozen_one_is_named_with_both() -> None:
    verify_digest("numbers", "aa", "aa")
    with pytest.raises(FrozenInputError, match="numbers: expected digest aa, this machine generated bb"):
        verify_digest("numbers", "bb", "aa")


def test_a_git_lfs_pointer_in_place_of_a_bundled_file_is_named_as_such(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 53415\n"
    (tmp_path / "alice.txt.gz").write_bytes(pointer)
    with pytest.raises(FrozenInputError, match=r"alice\.txt\.gz is a git-LFS pointer.*git lfs pull"):
        read_bundled("alice.txt.gz", sha256_bytes(pointer), tmp_path)


def test_a_damaged_or_missing_bundled_file_is_named(tmp_path: Path) -> None:
    content = b"once upon a time"
    (tmp_path / "tale.txt").write_bytes(content)
    assert read_bundled("tale.txt", sha256_bytes(content), tmp_path) == content
    (tmp_path / "tale.txt").write_bytes(b"Once upon a time")
    with pytest.raises(FrozenInputError, match=r"tale\.txt: expected SHA-256"):
        read_bundled("tale.txt", sha256_bytes(content), tmp_path)
    with pytest.raises(FrozenInputError, match=r"tale2\.txt, found none"):
        read_bundled("tale2.txt", sha256_bytes(content), tmp_path)
