"""Image classifiers of our own: a residual network after ResNet-50 and vision transformers after ViT-S and ViT-L.

Many ranks must equal one, so there is GroupNorm and LayerNorm, no BatchNorm and no dropout. Equality runs demand deterministic algorithms,
so the stem pools by a plain average and the end by a mean: the CUDA backward of adaptive pooling has no deterministic form. The activations
are smooth, since a rank's smaller batch may get another convolution algorithm: with ReLU the last bits flip kinks, and float32 gradients of the
ResNet-50-like model were 47,000 eps (0.6 %) from the float64 ones, with SiLU 83 eps (CPU, 4 samples, weights of the stem).
"""

from collections.abc import Callable

import torch
from torch import nn

from dualtrack.workloads.transformer_block import TransformerBlock

EXPANSION = 4  # output channels of a bottleneck over its inner channels


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut (He et al., CVPR 2016), with GroupNorm."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        """Build a block from `in_channels` to `4 * channels`; `stride` is the 3x3 convolution's."""
        super().__init__()
        out_channels = EXPANSION * channels
        self.body = nn.Sequential(
            nn.Conv2d(in_channels, channels, 1, bias=False), _group_norm(channels), nn.SiLU(),
            nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False), _group_norm(channels), nn.SiLU(),
            nn.Conv2d(channels, out_channels, 1, bias=False), _group_norm(out_channels),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), _group_norm(out_channels)
            )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Map `[B, in_channels, H, W]` to `[B, 4 * channels, H / stride, W / stride]`."""
        return nn.functional.silu(self.body(features) + self.shortcut(features))


class ResidualNetwork(nn.Module):
    """Stem, four stages of bottlenecks, mean over the image, linear classifier."""

    def __init__(self, depths: tuple[int, int, int, int], width: int, num_classes: int) -> None:
        """Build `depths[k]` bottlenecks of `width * 2**k` inner channels in stage k."""
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            _group_norm(width),
            nn.SiLU(),
            nn.AvgPool2d(3, 2, padding=1),
        )
        blocks, in_channels = [], width
        for stage, depth in enumerate(depths):
            channels = width * 2**stage
            for place in range(depth):
                blocks.append(Bottleneck(in_channels, channels, stride=2 if place == 0 and stage > 0 else 1))
                in_channels = EXPANSION * channels
        self.stages = nn.Sequential(*blocks)
        self.classifier = nn.Linear(in_channels, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images `[B, 3, H, W]` to logits `[B, num_classes]`."""
        logits: torch.Tensor = self.classifier(self.stages(self.stem(images)).mean(dim=(2, 3)))
        return logits


class VisionTransformer(nn.Module):
    """Patches, learned positions, transformer blocks, mean over the patches, linear classifier (Dosovitskiy et al., ICLR 2021)."""

    def __init__(self, image_pixels: int, patch_pixels: int, shape: tuple[int, int, int], num_classes: int) -> None:
        """Build for square images; `shape` is (width, number of blocks, heads a block)."""
        super().__init__()
        if image_pixels % patch_pixels:
            raise ValueError(f"expected image_pixels as a multiple of {patch_pixels}, got {image_pixels}")
        width, num_blocks, num_heads = shape
        self.patches = nn.Conv2d(3, width, patch_pixels, stride=patch_pixels)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (image_pixels // patch_pixels) ** 2, width))
        self.blocks = nn.Sequential(*[TransformerBlock(width, num_heads) for _ in range(num_blocks)])
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images `[B, 3, image_pixels, image_pixels]` to logits `[B, num_classes]`."""
        stream = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        logits: torch.Tensor = self.classifier(self.norm(self.blocks(stream).mean(dim=1)))
        return logits


def _group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(min(32, channels // 2), channels)


# name -> (image_pixels, num_classes) -> model
MODELS: dict[str, Callable[[int, int], nn.Module]] = {
    "resnet50": lambda _, num_classes: ResidualNetwork((3, 4, 6, 3), 64, num_classes),
    "vit_s": lambda image_pixels, num_classes: VisionTransformer(image_pixels, 16, (384, 12, 6), num_classes),
    "vit_l": lambda image_pixels, num_classes: VisionTransformer(image_pixels, 16, (1024, 24, 16), num_classes),
    "resnet_tiny": lambda _, num_classes: ResidualNetwork((1, 1, 1, 1), 8, num_classes),
    "vit_tiny": lambda image_pixels, num_classes: VisionTransformer(image_pixels, 8, (48, 2, 3), num_classes),
}


def build_model(name: str, image_pixels: int = 224, num_classes: int = 1000) -> nn.Module:
    """Build a model of `MODELS` with fresh parameters.

    Raises:
        ValueError: There is no such model.
    """
    if name not in MODELS:
        raise ValueError(f"expected a model of {', '.join(MODELS)}, got {name!r}")
    return MODELS[name](image_pixels, num_classes)
