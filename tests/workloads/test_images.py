"""The images workload: a frozen recipe, samples without a copy, and the precision that was asked for."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from dualtrack.facts.digests import sha256_json
from dualtrack.facts.errors import FrozenInputError
from dualtrack.training.frozen_batches import digest_batch
from dualtrack.training.workload import load_workload, seed_everything
from dualtrack.workloads import images
from dualtrack.workloads.images import Images, ImagesDataset, batch_bytes, normalise
from dualtrack.workloads.recipes import recipe_digest

FACTORIES = (
    "create", "create_small_vit_fp32", "create_full", "create_full_resnet50_uint8", "create_full_resnet50_fp32", "create_full_vit_s_uint8",
    "create_full_vit_s_fp32", "create_full_vit_l",
)  # fmt: skip


def small_dataset(dtype: torch.dtype = torch.uint8, augment: bool = False) -> ImagesDataset:
    return ImagesDataset(640, dtype, image_pixels=64, num_sources=16, augment=augment)


@pytest.mark.parametrize(
    ("pixels", "num_sources", "dtype", "digest"),
    [
        (64, 16, torch.uint8, "9ab0d9b023095e3ded362fb9db3f7b86ae6f2641e64a5d07937b2966f0b7dbea"),
        (64, 16, torch.float32, "97217215e801b56b7cb863d267fb26000cbda69d656b764fece4f5922629aad4"),
        (224, 64, torch.uint8, "c2513b2a394fab8cad5c51025c72bfa264615f566f045b874a91e3f963c1ee85"),
        (224, 64, torch.float32, "90d288ed92f4f5f0712e4c7f86ec2c908a98e3007760939f323e5f187760bf54"),
    ],
)
def test_the_recipe_gives_its_frozen_digest(pixels: int, num_sources: int, dtype: torch.dtype, digest: str) -> None:
    assert recipe_digest(ImagesDataset(640, dtype, image_pixels=pixels, num_sources=num_sources)) == digest


def test_sources_that_differ_in_one_pixel_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    paint = images.paint_source

    def paint_wrong(seed: int, number: int, num_pixels: int) -> np.ndarray[Any, Any]:
        painted = paint(seed, number, num_pixels)
        painted[0, 0, 0] ^= number == 7
        return painted

    monkeypatch.setattr(images, "paint_source", paint_wrong)
    with pytest.raises(FrozenInputError, match="16 sources of 73 pixels"):
        images._sources.__wrapped__(images.SEED, 16, 73, torch.uint8)


def test_sources_differ_from_each_other_and_show_edges_and_gradients() -> None:
    sources = small_dataset().sources[0].short()
    assert len({source.numpy().tobytes() for source in sources}) == 16
    steps = (sources[..., 1:] - sources[..., :-1]).abs()
    assert 0.4 < float((steps <= 4).float().mean()) < 0.98, "smooth areas"
    assert 0.01 < float((steps >= 32).float().mean()) < 0.3, "edges"


def test_a_sample_is_a_view_of_its_source_so_that_collate_is_the_only_copy() -> None:
    for augment in (False, True):
        dataset = small_dataset(augment=augment)
        image, _ = dataset[5]
        assert image.untyped_storage().data_ptr() == dataset.sources.untyped_storage().data_ptr()
        assert image.shape == (3, 64, 64)


def test_float32_samples_are_the_normalised_uint8_samples_bit_for_bit() -> None:
    pixels, values = small_dataset(), small_dataset(torch.float32)
    for index in range(0, 640, 40):
        assert torch.equal(normalise(pixels[index][0], torch.float32), values[index][0])
        assert pixels[index][1] == values[index][1]
    assert torch.equal(normalise(torch.arange(256, dtype=torch.uint8), torch.float32) * 64 + 127.5, torch.arange(256.0))


def test_half_of_the_samples_are_mirrored_and_crops_reach_every_margin() -> None:
    dataset = small_dataset()
    mirrored, offsets = 0, set()
    plane = dataset.sources[0].numel()
    for index in range(len(dataset)):
        offset = dataset[index][0].storage_offset()
        mirrored += offset >= plane
        offsets.add((offset % (73 * 73) // 73, offset % 73))
    assert 260 < mirrored < 380
    assert {row for row, _ in offsets} == {column for _, column in offsets} == set(range(10))
    assert torch.equal(dataset.sources[1], dataset.sources[0].flip(-1))


def test_augmentation_is_drawn_from_random_and_the_class_is_not() -> None:
    plain, augmented = small_dataset(), small_dataset(augment=True)
    random.seed(3)
    first = [augmented[9] for _ in range(8)]
    random.seed(3)
    again = [augmented[9] for _ in range(8)]
    assert all(torch.equal(one, other) for (one, _), (other, _) in zip(first, again, strict=True))
    assert len({image.storage_offset() for image, _ in first}) > 4
    assert {label for _, label in first} == {plain[9][1]}
    state = random.getstate()
    assert torch.equal(plain[9][0], plain[9][0])
    assert random.getstate() == state


def test_a_seeded_epoch_of_the_legacy_loader_has_its_digest_with_augmentation_and_shuffle() -> None:
    # made with torch 2.13, the same with 2.11: what a freeze of digests only relies on
    seed_everything(20260101)
    epoch = [digest_batch(batch, "batch") for batch in images.create().legacy_loader("train")]
    assert sha256_json(epoch) == "487cc4e417ca1b54e9c1b563132a34c6c45e5e5a16181b9cf1575469685028fd"


def test_the_legacy_loader_repeats_with_the_seed_and_differs_between_epochs() -> None:
    def epoch() -> list[torch.Tensor]:
        return [batch for batch, _ in images.create().legacy_loader("train")]

    seed_everything(5)
    first, second = epoch(), epoch()
    seed_everything(5)
    again = epoch()
    assert len(first) == 20
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_batch_bytes_are_those_of_a_real_batch() -> None:
    for dtype in (torch.uint8, torch.float32):
        dataset = small_dataset(dtype)
        batch = default_collate([dataset[index] for index in range(32)])
        assert sum(leaf.nbytes for leaf in batch) == batch_bytes(32, dtype, 64)
    assert batch_bytes(256, torch.uint8) == 256 * (3 * 224 * 224 + 8)


@pytest.mark.parametrize("factory", FACTORIES)
def test_each_factory_builds_a_loadable_job_of_its_own_name(factory: str) -> None:
    workload = load_workload(f"dualtrack.workloads.images:{factory}")
    assert isinstance(workload, Images)
    full = factory.startswith("create_full")
    assert workload.settings.batch_size == (64 if factory.endswith("vit_l") else 256 if full else 32)
    assert workload.settings.num_train_samples == 20 * workload.settings.batch_size
    assert workload.settings.image_pixels == (224 if full else 64)
    assert workload.autocast_dtype == (torch.bfloat16 if full else None)


def test_no_two_jobs_share_a_name_and_so_a_folder_of_frozen_inputs() -> None:
    names = [
        load_workload(f"dualtrack.workloads.images:{factory}").name for factory in FACTORIES if factory != "create_full"
    ]
    assert len(set(names)) == len(names)
    assert load_workload(images.SIZES["small"]).name == load_workload("images").name == "images"
    assert load_workload(images.SIZES["full"]).name == "images_resnet50_uint8"


def test_autocast_follows_the_attribute_and_never_touches_float64() -> None:
    torch.manual_seed(0)
    workload = images.create_small_vit_fp32()
    model = workload.model()
    batch = default_collate([small_dataset(torch.float32)[index] for index in range(32)])
    plain = workload.loss(model, batch).detach()
    workload.autocast_dtype = torch.bfloat16
    mixed = workload.loss(model, batch).detach()
    assert mixed.dtype == plain.dtype == torch.float32
    assert 0 < float((mixed - plain).abs()) < 0.05
    truth = workload.loss(model.double(), (batch[0].double(), batch[1])).detach()
    assert truth.dtype == torch.float64
    assert float((plain - truth).abs()) < 1e-5 < float((mixed - truth).abs())


def test_uint8_and_float32_hosts_give_the_model_the_same_input() -> None:
    torch.manual_seed(0)
    workload = images.create()
    model = workload.model()
    losses = [
        workload.loss(model, default_collate([small_dataset(dtype)[index] for index in range(16)]))
        for dtype in (torch.uint8, torch.float32)
    ]
    assert torch.equal(*losses)


def test_another_dtype_or_an_index_outside_is_refused() -> None:
    with pytest.raises(ValueError, match=r"uint8 or torch\.float32, got torch\.float64"):
        small_dataset(torch.float64)
    with pytest.raises(IndexError, match=r"0\.\.639, got 640"):
        small_dataset()[640]
