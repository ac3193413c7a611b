"""Images of megabytes a batch: 224 x 224 x 3 as uint8 or float32 on the host, residual networks and vision transformers in bf16.

Nothing large is stored. The data set is a recipe: source images painted from integers, and samples that are crops of them, mirrored or
not. A sample is a *view* of its source, so that the loader's collate is the only copy and the job is as data-bound as a loader can make it.
The pipeline is the *legacy* side of every comparison and is never improved.
"""

import functools
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from dualtrack.facts.digests import tensor_digest
from dualtrack.training.workload import Split
from dualtrack.workloads.recipes import mix, verify_digest
from dualtrack.workloads.source_images import paint_source
from dualtrack.workloads.vision_models import build_model

SIZES = {"small": "dualtrack.workloads.images:create", "full": "dualtrack.workloads.images:create_full"}
"""What `--size` stands for; the other factories at the end of this module are reached by their full reference."""

SEED = 20260101
# (seed, number, pixels) -> digest of the painted sources; other settings are allowed and have no frozen digest
SOURCE_DIGESTS = {
    (SEED, 16, 73): "c2b02ef8fd5e0cc65608f44db8f267cf7a65ee6efc5400ce1e57c08ced52ab76",
    (SEED, 64, 256): "0c0c55b0646abe75b0e6e3c9f0eb9a02669b6195c261a2bc97c9227fb2fe7ff1",
}


@dataclass(frozen=True, kw_only=True)
class ImagesSettings:
    """What distinguishes one job of this module from another."""

    name: str
    model_name: str
    dtype: torch.dtype
    image_pixels: int = 224
    batch_size: int = 256
    num_workers: int = 8  # fixed, since the workers' number decides the augmentation's seeds
    num_train_samples: int = 5120  # twenty full batches; a tenth of it is two
    num_eval_samples: int = 1024
    num_sources: int = 64
    num_classes: int = 1000
    autocast_dtype: torch.dtype | None = torch.bfloat16


class ImagesDataset(Dataset[tuple[torch.Tensor, int]]):
    """Crops of painted source images; the class is the number of the source.

    Holds the sources twice, plain and mirrored, once a process: 25 MB for 64 sources of uint8 at 224 pixels, 101 MB in float32.
    """

    def __init__(
        self, num_samples: int, dtype: torch.dtype = torch.uint8, seed: int = SEED, *, image_pixels: int = 224, num_sources: int = 64,
        augment: bool = False,
    ) -> None:  # fmt: skip
        """Paint the sources, or take them from this process's cache.

        Args:
            num_samples: Length; it costs nothing.
            dtype: `torch.uint8` for pixels, `torch.float32` for normalised values.
            seed: Of the sources, and of the samples without augmentation.
            image_pixels: Side of a sample; the sources are an eighth larger.
            num_sources: Number of source images and of classes.
            augment: Draw crop and mirroring from `random` in the worker; otherwise they follow from the index.

        Raises:
            FrozenInputError: The painted sources differ from the frozen recipe.
            ValueError: The dtype is another one.
        """
        if dtype not in (torch.uint8, torch.float32):
            raise ValueError(f"expected dtype torch.uint8 or torch.float32, got {dtype}")
        self.num_samples, self.num_sources, self.image_pixels = num_samples, num_sources, image_pixels
        self.seed, self.augment = seed, augment
        self.sources = _sources(seed, num_sources, image_pixels * 8 // 7, dtype)

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Return one image `[3, image_pixels, image_pixels]`, a view, and its class."""
        if not 0 <= index < self.num_samples:
            raise IndexError(f"expected an index in 0..{self.num_samples - 1}, got {index}")
        bits = mix(self.seed, index)
        source = bits % self.num_sources
        margin = self.sources.shape[-1] - self.image_pixels
        if self.augment:
            mirrored, top, left = random.randint(0, 1), random.randint(0, margin), random.randint(0, margin)
        else:
            mirrored, top, left = bits >> 63, (bits >> 32) % (margin + 1), (bits >> 48) % (margin + 1)
        return self.sources[mirrored, source, :, top : top + self.image_pixels, left : left + self.image_pixels], source


@functools.lru_cache(maxsize=4)
def _sources(seed: int, num_sources: int, num_pixels: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the sources `[2, num_sources, 3, num_pixels, num_pixels]`, plain and mirrored; cached because each epoch may build a loader."""
    painted = np.stack([paint_source(seed, number, num_pixels) for number in range(num_sources)])
    expected = SOURCE_DIGESTS.get((seed, num_sources, num_pixels))
    if expected is not None:
        verify_digest(
            f"images, {num_sources} sources of {num_pixels} pixels",
            tensor_digest("uint8", painted.shape, painted.tobytes()),
            expected,
        )
    sources = torch.from_numpy(np.stack([painted, painted[..., ::-1]]))
    return sources if dtype == torch.uint8 else normalise(sources, dtype)


def normalise(pixels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Map pixels 0..255 to -2..2; both operations are exact in float32, so host and device agree bit for bit."""
    return (pixels.to(dtype) - 127.5) / 64


def batch_bytes(batch_size: int, dtype: torch.dtype, image_pixels: int = 224) -> int:
    """Return the tensor bytes of one batch: the images and the int64 classes."""
    return batch_size * (3 * image_pixels**2 * dtype.itemsize + torch.int64.itemsize)


class Images:
    """One image classification job.

    `autocast_dtype` is the precision of `loss`: bf16 at full size, None (no autocast) on small ones. Equality runs set it to None on the
    instance; a float64 model is never autocast.
    """

    def __init__(self, settings: ImagesSettings) -> None:
        """Keep the settings; nothing is painted yet."""
        self.settings = settings
        self.name = settings.name
        self.autocast_dtype = settings.autocast_dtype

    def legacy_loader(self, split: Split) -> DataLoader[Any]:
        """Build the old synchronous loader; pageable memory, new workers every epoch, no short batch in training."""
        settings, training = self.settings, split == "train"
        dataset = ImagesDataset(
            settings.num_train_samples if training else settings.num_eval_samples, settings.dtype,
            image_pixels=settings.image_pixels, num_sources=settings.num_sources, augment=training,
        )  # fmt: skip
        return DataLoader(
            dataset, settings.batch_size, shuffle=training, num_workers=settings.num_workers, drop_last=training
        )

    def to_device(self, batch: Any, device: torch.device) -> Any:
        """Copy images `[B, 3, H, W]` and classes `[B]` with two blocking copies, into a list as the default collate makes one."""
        images, classes = batch
        return [images.to(device), classes.to(device)]

    def model(self) -> nn.Module:
        """Build the model."""
        return build_model(self.settings.model_name, self.settings.image_pixels, self.settings.num_classes)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build SGD with momentum for residual networks, AdamW for transformers."""
        if self.settings.model_name.startswith("resnet"):
            return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
        return torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.05)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the mean cross entropy over the batch; uint8 pixels become the model's dtype on the device."""
        images, classes = batch
        dtype = next(model.parameters()).dtype
        inputs = normalise(images, dtype) if images.dtype == torch.uint8 else images.to(dtype)
        mixed = self.autocast_dtype is not None and dtype == torch.float32
        with torch.autocast(images.device.type, self.autocast_dtype, enabled=mixed):
            return nn.functional.cross_entropy(model(inputs), classes)


def create() -> Images:
    """Build the small job: a residual network of 132,504 parameters on uint8 images of 64 pixels, float32 throughout."""
    return _small("images", "resnet_tiny", torch.uint8)


def create_small_vit_fp32() -> Images:
    """Build the small job with a vision transformer of 69,760 parameters on float32 images."""
    return _small("images_vit_tiny_fp32", "vit_tiny", torch.float32)


def create_full() -> Images:
    """Build what `--size full` means: the residual network of 25.6 M parameters on uint8 images."""
    return create_full_resnet50_uint8()


def create_full_resnet50_uint8() -> Images:
    """Build the job after ResNet-50 on uint8 images."""
    return Images(ImagesSettings(name="images_resnet50_uint8", model_name="resnet50", dtype=torch.uint8))


def create_full_resnet50_fp32() -> Images:
    """Build the job after ResNet-50 on float32 images."""
    return Images(ImagesSettings(name="images_resnet50_fp32", model_name="resnet50", dtype=torch.float32))


def create_full_vit_s_uint8() -> Images:
    """Build the job after ViT-S (22.0 M parameters) on uint8 images."""
    return Images(ImagesSettings(name="images_vit_s_uint8", model_name="vit_s", dtype=torch.uint8))


def create_full_vit_s_fp32() -> Images:
    """Build the job after ViT-S on float32 images."""
    return Images(ImagesSettings(name="images_vit_s_fp32", model_name="vit_s", dtype=torch.float32))


def create_full_vit_l() -> Images:
    """Build the job after ViT-L (304.3 M parameters) on uint8 images; stage 3's gradient traffic is largest here.

    Batches are of 64: in float64, as the equality checks run it, the model saves 0.62 GB a sample for backward (counted on CPU), and 256 of
    those would not fit on one GPU of 141 GB.
    """
    settings = ImagesSettings(
        name="images_vit_l_uint8", model_name="vit_l", dtype=torch.uint8, batch_size=64, num_train_samples=1280
    )
    return Images(settings)


def _small(name: str, model_name: str, dtype: torch.dtype) -> Images:
    settings = ImagesSettings(
        name=name, model_name=model_name, dtype=dtype, image_pixels=64, batch_size=32, num_workers=2, num_train_samples=640,
        num_eval_samples=128, num_sources=16, num_classes=16, autocast_dtype=None,
    )  # fmt: skip
    return Images(settings)
