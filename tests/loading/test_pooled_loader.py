"""The pooled loader gives legacy's batches: content, order, structure, random draws, for every configuration that legacy offers."""

import itertools
import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from example_datasets import (
    AugmentedDataset,
    AugmentedStream,
    Images,
    Pair,
    SizedBatches,
    WholeBatches,
    custom_collate,
)
from pool_fakes import same, seed_all
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    WeightedRandomSampler,
    default_collate,
    get_worker_info,
)
from torch.utils.data._utils.collate import default_collate_fn_map

from dualtrack.facts.errors import LoaderError
from dualtrack.loading.pooled_loader import PooledLoader

CAP_BYTES = 16 << 20

pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create 3 worker:UserWarning"
)  # on a machine with two cores


@pytest.fixture(autouse=True, scope="session")
def _imports_are_done_once_for_all_forkserver_workers() -> None:
    multiprocessing.set_forkserver_preload(["torch", "example_datasets", "dualtrack.loading.slot_collate"])


def init_worker(worker_id: int) -> None:
    """Mark the worker's own dataset object, and draw, as worker init functions do."""
    info = get_worker_info()
    assert info is not None and info.id == worker_id
    info.dataset.num_samples -= worker_id % 2  # type: ignore[attr-defined]
    torch.rand(worker_id + 1)


@dataclass(frozen=True)
class Configuration:
    """One way to build the legacy loader."""

    dataset: str = "map"
    num_workers: int = 2
    start_method: str | None = None
    persistent: bool = False
    collate: str = "default"
    drop_last: bool = False
    shuffle: str = "shuffle"
    stop_after: int | None = None

    def build(self) -> "DataLoader[Any]":
        options: dict[str, Any] = {
            "batch_size": 5,
            "num_workers": self.num_workers,
            "drop_last": self.drop_last,
            "collate_fn": custom_collate if self.collate == "custom" else None,
        }
        if self.num_workers:
            options |= {"persistent_workers": self.persistent, "multiprocessing_context": self.start_method}
        if self.dataset == "iterable":
            return DataLoader(AugmentedStream(), **options)
        dataset = AugmentedDataset()
        if self.shuffle == "shuffle":
            return DataLoader(dataset, shuffle=True, **options)
        if self.shuffle == "generator":
            return DataLoader(dataset, shuffle=True, generator=torch.Generator().manual_seed(3), **options)
        if self.shuffle == "sampler":
            return DataLoader(dataset, sampler=WeightedRandomSampler([1.0] * 37, 23), **options)
        del options["batch_size"], options["drop_last"]
        return DataLoader(dataset, batch_sampler=BatchSampler(RandomSampler(dataset), 4, self.drop_last), **options)

    def is_valid(self) -> bool:
        has_workers = self.num_workers > 0
        return (has_workers or not (self.persistent or self.start_method)) and (
            self.dataset == "map" or self.shuffle == "shuffle"
        )

    def is_spawned_once(self) -> bool:
        """A spawned worker imports torch for seconds; persistent ones do so once, not once an epoch."""
        return self.start_method == "spawn" and self.persistent and self.num_workers == 2

    def __str__(self) -> str:
        return "-".join(str(value) for value in vars(self).values())


AXES: dict[str, tuple[Any, ...]] = {
    "dataset": ("map", "iterable"),
    "num_workers": (2, 0, 3),
    "start_method": (None, "forkserver", "spawn"),
    "persistent": (False, True),
    "collate": ("default", "custom"),
    "drop_last": (False, True),
    "shuffle": ("shuffle", "generator", "sampler", "batch_sampler"),
    "stop_after": (None, 3),
}


def cross_product() -> list[Configuration]:
    every = (Configuration(**dict(zip(AXES, values, strict=True))) for values in itertools.product(*AXES.values()))
    return [configuration for configuration in every if configuration.is_valid()]


def pairwise(configurations: list[Configuration]) -> list[Configuration]:
    """Choose greedily until every pair of values that can occur together has occurred."""

    def pairs(configuration: Configuration) -> set[Any]:
        return set(itertools.combinations(vars(configuration).items(), 2))

    missing = set().union(*map(pairs, configurations))
    chosen = []
    while missing:
        best = max(configurations, key=lambda configuration: len(pairs(configuration) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def record(loader: Any, stop_after: int | None, num_epochs: int = 3) -> tuple[list[Any], torch.Tensor]:
    """Return the batches of some epochs, each left early if asked, and what the trainer's generator gives afterwards."""
    epochs = []
    for _ in range(num_epochs):
        batches = []
        for batch in loader:
            batches.append(batch)
            if len(batches) == stop_after:
                break
        epochs.append(batches)
    return epochs, torch.rand(2)


def assert_like_legacy(
    build: Callable[[], "DataLoader[Any]"], stop_after: int | None = None, num_epochs: int = 3
) -> None:
    seed_all()
    expected = record(build(), stop_after, num_epochs)
    seed_all()
    with PooledLoader(build(), "cpu", CAP_BYTES) as loader:
        found = record(loader, stop_after, num_epochs)
    assert sum(map(len, expected[0])) > 0
    assert same(found, expected)


EVERY = cross_product()
SPAWNED = pairwise([configuration for configuration in EVERY if configuration.is_spawned_once()])
SPAWNED += [
    Configuration(start_method="spawn"),
    Configuration(dataset="iterable", start_method="spawn", collate="custom"),
]
NOT_SPAWNED = [configuration for configuration in EVERY if configuration.start_method != "spawn"]
ONE_SPAWNED = next(configuration for configuration in SPAWNED if configuration.persistent)


@pytest.mark.parametrize("configuration", [*pairwise(NOT_SPAWNED), ONE_SPAWNED], ids=str)
def test_three_epochs_are_bit_identical_to_legacy(configuration: Configuration) -> None:
    assert_like_legacy(configuration.build, configuration.stop_after)


@pytest.mark.full
@pytest.mark.parametrize("configuration", [*(c for c in NOT_SPAWNED if c.num_workers != 3), *SPAWNED], ids=str)
def test_three_epochs_are_bit_identical_to_legacy_in_the_cross_product(configuration: Configuration) -> None:
    assert_like_legacy(configuration.build, configuration.stop_after)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_ready_batches_of_an_iterable_come_as_they_are(num_workers: int) -> None:
    assert_like_legacy(lambda: DataLoader(WholeBatches(), batch_size=None, num_workers=num_workers))


def test_the_worker_init_function_sees_the_users_own_dataset() -> None:
    assert_like_legacy(lambda: DataLoader(AugmentedStream(), batch_size=5, num_workers=2, worker_init_fn=init_worker))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_users_types_in_the_default_collate_map_are_honoured(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def collate_pair(samples: Any, *, collate_fn_map: Any = None) -> Any:
        return Pair(default_collate([sample.left for sample in samples]), len(samples))

    monkeypatch.setitem(default_collate_fn_map, Pair, collate_pair)
    pairs = [Pair(torch.full((3,), float(index)), index) for index in range(11)]
    assert_like_legacy(lambda: DataLoader(pairs, batch_size=4, num_workers=num_workers))  # type: ignore[arg-type]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_object_made_of_our_stacks_never_views_a_slot(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from example_datasets import Opaque

    def collate_opaque(samples: Any, *, collate_fn_map: Any = None) -> Any:
        from torch.utils.data._utils.collate import collate

        return Opaque(collate([sample.held for sample in samples], collate_fn_map=collate_fn_map))

    monkeypatch.setitem(default_collate_fn_map, Opaque, collate_opaque)
    samples = [Opaque(torch.full((3,), float(index))) for index in range(40)]
    assert_like_legacy(lambda: DataLoader(samples, batch_size=2, num_workers=num_workers))  # type: ignore[arg-type]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_mixed_dtypes_and_permuted_samples_collate_by_legacys_rules(num_workers: int) -> None:
    mixed = [torch.ones(2, dtype=torch.int32 if index % 2 else torch.float32) * index for index in range(8)]
    random = [torch.randn(2, 3, 64, 100, generator=torch.Generator().manual_seed(index)) for index in range(8)]
    permuted = [sample[0].permute(2, 0, 1) for sample in random]
    channels_last = [sample.contiguous(memory_format=torch.channels_last) for sample in random]
    shifting = [sample if index % 2 else sample.double() for index, sample in enumerate(random)]
    for samples in (mixed, permuted, channels_last, shifting):
        build = lambda samples=samples: DataLoader(samples, batch_size=4, num_workers=num_workers)  # noqa: E731
        assert_like_legacy(build, num_epochs=1)
        with PooledLoader(build(), "cpu", CAP_BYTES) as loader:
            for found, expected in zip(loader, build(), strict=True):
                assert found.stride() == expected.stride()


def test_len_and_attributes_are_the_wrapped_loaders() -> None:
    legacy = DataLoader(Images(10), batch_size=4, drop_last=True)
    with PooledLoader(legacy, "cpu", CAP_BYTES) as loader:
        assert len(loader) == len(legacy) == 2
        assert loader.dataset is legacy.dataset
        assert loader.sampler is legacy.sampler
        assert loader.batch_size == 4
        with pytest.raises(AttributeError):
            _ = loader.no_such_thing


def test_len_of_an_iterable_dataset_is_legacys_estimate() -> None:
    with PooledLoader(DataLoader(AugmentedStream(), batch_size=5, num_workers=2), "cpu", CAP_BYTES) as loader:
        assert len(loader) == 8


def test_the_wrapped_loader_is_untouched_and_still_usable() -> None:
    legacy = DataLoader(Images(8), batch_size=4, num_workers=2, persistent_workers=True)
    before = {name: value for name, value in vars(legacy).items() if name != "_iterator"}
    expected = list(legacy)
    with PooledLoader(legacy, "cpu", CAP_BYTES) as loader:
        assert same(list(loader), expected)
    assert {name: value for name, value in vars(legacy).items() if name != "_iterator"} == before
    assert same(list(legacy), expected)


def test_draws_happen_when_the_iterator_is_made_as_in_legacy() -> None:
    states = []
    for build in (lambda legacy: legacy, lambda legacy: PooledLoader(legacy, "cpu", CAP_BYTES)):
        seed_all()
        iterator = iter(build(DataLoader(Images(8), batch_size=4, num_workers=0)))
        states.append(torch.get_rng_state())
        del iterator
    assert torch.equal(*states)


def test_without_workers_nothing_is_fetched_ahead() -> None:
    legacy_draws = []
    for wrap in (lambda legacy: legacy, lambda legacy: PooledLoader(legacy, "cpu", CAP_BYTES)):
        seed_all()
        loader = wrap(DataLoader(AugmentedDataset(8), batch_size=2, num_workers=0))
        legacy_draws.append([(batch["image"].sum().item(), torch.rand(1).item()) for batch in loader])
    assert legacy_draws[0] == legacy_draws[1]


@dataclass
class Refused:
    """A loader that can't be preserved, and a word of the reason."""

    build: Callable[[], Any]
    reason: str


class Doubling(DataLoader[Any]):
    """A subclass that changes batches on their way."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return (2 * batch for batch in super().__iter__())


@pytest.mark.parametrize(
    "refused",
    [
        Refused(lambda: DataLoader(Images(4), num_workers=2, in_order=False), "in_order=False"),
        Refused(lambda: Doubling(Images(4)), "Doubling overrides __iter__"),
        Refused(lambda: [1, 2], "builtins.list"),
        Refused(lambda: DataLoader(Images(4), num_workers=1, prefetch_factor=0), "prefetch_factor"),
    ],
    ids=lambda refused: refused.reason,
)
def test_a_loader_that_cannot_be_preserved_is_refused_with_the_reason(refused: Refused) -> None:
    with pytest.raises(LoaderError, match=refused.reason):
        PooledLoader(refused.build(), "cpu", CAP_BYTES)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="slot_byte"):
        PooledLoader(DataLoader(Images(4)), "cpu", CAP_BYTES, slot_byte=3)  # type: ignore[call-arg]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_a_cuda_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a CUDA device"):
        PooledLoader(DataLoader(Images(4)), "cuda", CAP_BYTES)


def test_stats_are_json_able_and_name_what_was_not_measured() -> None:
    with PooledLoader(DataLoader(SizedBatches([3, 5]), batch_size=1), "cpu", CAP_BYTES) as loader:
        list(loader)
        stats = loader.stats().model_dump(mode="json")
    assert stats["num_batches"] == 2
    assert stats["pinned_peak_bytes"] is None
    assert stats["torch_pinned_peak_bytes"] is None or torch.cuda.is_available()
    assert stats["pool_peak_bytes"] <= stats["cap_bytes"] == CAP_BYTES
    assert loader.stats().pool_current_bytes == 0
