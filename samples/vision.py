"""Pictures read by a language model: patches, a small vision transformer, and text that attends to what it saw.

    python samples/vision.py

The pictures of a batch have different heights. They lie in one tensor, empty below, and `seq_lens_kv` says how many
tokens of each are real; those tokens come first, because patches are counted line by line. The text computes keys and
values of the pictures once, and then uses them for a whole prompt and for each token after it.

On an NVIDIA GPU it runs on cuDNN, in bfloat16. Without one it runs the CPU reference in float32, at a smaller size.
Either way every result is compared with that of PyTorch's functions in float32, on the same parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import cudnn_sdpa
from cudnn_sdpa import conv2d, layer_norm, plan_cache, sdpa

ON_GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
PATCH = 16
#: Patches in a line, and lines of each picture.
COLUMNS, LINES = (24, (24, 17, 24, 9, 13, 1, 20, 24)) if ON_GPU else (4, (4, 1, 3))
LAYERS, WIDTH, HEADS = (6, 1024, 16) if ON_GPU else (2, 64, 4)
TEXT_WIDTH, TEXT_HEADS = (2048, 32) if ON_GPU else (96, 6)
PROMPT, STEPS = (77, 16) if ON_GPU else (9, 4)
BATCH, MOST_LINES = len(LINES), max(LINES)
SEED = 8
#: How large the difference from float32 may be, as a share of the norm of the whole.
TOLERANCE = 3e-2 if ON_GPU else 1e-5

KeysAndValues = tuple[Tensor, Tensor]
console = Console()


@dataclass(frozen=True)
class Functions:
    """What a model is computed with. They come with each call, so that the check has the same parameters."""

    convolve: Callable[[Tensor, nn.Conv2d], Tensor]
    normalize: Callable[[Tensor, nn.LayerNorm], Tensor]
    attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  #: of queries, keys, values and numbers of keys


def masked(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """PyTorch's attention has no lengths: the same as a mask, for all queries and heads of a picture."""
    seen = torch.arange(k.shape[2], device=k.device) < lengths.view(-1, 1, 1, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


OURS = Functions(
    lambda x, conv: conv2d(x, conv.weight, conv.bias, stride=PATCH),
    lambda x, norm: layer_norm(x, norm.weight, norm.bias),
    lambda q, k, v, lengths: sdpa(q, k, v, seq_lens_kv=lengths),
)
PYTORCH = Functions(
    lambda x, conv: F.conv2d(x, conv.weight, conv.bias, stride=PATCH),
    lambda x, norm: F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias),
    masked,
)


def in_heads(rows: Tensor, heads: int) -> Tensor:
    """Rows (B, S, width) as (B, H, S, D), without a copy."""
    return rows.unflatten(-1, (heads, -1)).transpose(1, 2)


class EncoderLayer(nn.Module):
    """Every token of a picture attends to all of its tokens; then an MLP. Each is behind a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, lengths: Tensor, use: Functions) -> Tensor:
        q, k, v = (in_heads(part, HEADS) for part in self.qkv(use.normalize(x, self.before_attention)).chunk(3, dim=-1))
        x = x + self.out(use.attend(q, k, v, lengths).transpose(1, 2).flatten(2))
        return x + self.mlp(use.normalize(x, self.before_mlp))


class Encoder(nn.Module):
    """From pictures (B, 3, height, width) to tokens (B, S, WIDTH): one for the whole, then one for each patch."""

    def __init__(self) -> None:
        super().__init__()
        self.to_patches = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)
        self.whole = nn.Parameter(torch.randn(WIDTH))
        self.positions = nn.Parameter(torch.randn(1 + MOST_LINES * COLUMNS, WIDTH))
        self.layers = nn.ModuleList(EncoderLayer() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)

    def patches(self, pictures: Tensor, use: Functions) -> Tensor:
        """A row for each patch. cuDNN and PyTorch give channels last, where this is a view."""
        return use.convolve(pictures, self.to_patches).flatten(2).transpose(1, 2)

    def forward(self, pictures: Tensor, lengths: Tensor, use: Functions) -> Tensor:
        of_pictures = self.whole.expand(len(pictures), 1, -1)
        x = torch.cat([of_pictures, self.patches(pictures, use)], dim=1) + self.positions
        for layer in self.layers:
            x = layer(x, lengths, use)
        return use.normalize(x, self.norm)


class CrossAttention(nn.Module):
    """Text attends to a picture. There is nothing causal in it: each token of the text sees the whole picture."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.head_dim = nn.LayerNorm(TEXT_WIDTH), TEXT_WIDTH // TEXT_HEADS
        self.queries, self.out = nn.Linear(TEXT_WIDTH, TEXT_WIDTH), nn.Linear(TEXT_WIDTH, TEXT_WIDTH)
        self.to_keys_and_values = nn.Linear(WIDTH, 2 * TEXT_WIDTH)

    def keys_and_values(self, picture: Tensor) -> KeysAndValues:
        """Those of a picture's tokens. Rows past its length are numbers that nobody looks at."""
        k, v = (in_heads(part, TEXT_HEADS) for part in self.to_keys_and_values(picture).chunk(2, dim=-1))
        return k, v

    def forward(self, text: Tensor, seen: KeysAndValues, lengths: Tensor, use: Functions) -> Tensor:
        q = in_heads(self.queries(use.normalize(text, self.before)), TEXT_HEADS)
        return text + self.out(use.attend(q, *seen, lengths).transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Both. A real one has the text's own layers between many of the latter."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.cross_attention = Encoder(), CrossAttention()
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                # Attention with small scores is a mean of all values, and the check would hardly see a wrong key.
                nn.init.normal_(module.weight, std=1.5 * module.weight[0].numel() ** -0.5)
            elif isinstance(module, nn.LayerNorm):
                nn.init.normal_(module.weight, mean=1, std=0.2)
                nn.init.normal_(module.bias, std=0.2)


def run(model: Model, pictures: Tensor, lengths: Tensor, texts: list[Tensor], use: Functions) -> dict[str, Tensor]:
    """All that is compared: patches, the pictures' real tokens, and the text, first its prompt, then token by token."""
    tokens = model.encoder(pictures, lengths, use)
    seen = model.cross_attention.keys_and_values(tokens)
    prompt, *steps = (model.cross_attention(text, seen, lengths, use) for text in texts)
    is_real = torch.arange(tokens.shape[1], device=tokens.device) < lengths.unsqueeze(1)
    return {
        "patches, by a convolution": model.encoder.patches(pictures, use),
        f"tokens of the pictures, after {LAYERS} layers": tokens[is_real],
        f"a prompt of {PROMPT} that attends to them": prompt,
        f"{STEPS} further tokens, one by one": torch.cat(steps, dim=1),
    }


def draw_inputs() -> tuple[Tensor, Tensor, list[Tensor]]:
    """Pictures, empty below their last line, how many tokens each has, and texts of several lengths."""
    pictures = torch.randn(BATCH, 3, MOST_LINES * PATCH, COLUMNS * PATCH, device=DEVICE, dtype=DTYPE)
    for picture, lines in zip(pictures, LINES, strict=True):
        picture[:, lines * PATCH :] = 0
    lengths = torch.tensor([1 + lines * COLUMNS for lines in LINES], device=DEVICE, dtype=torch.int32)
    sizes = [PROMPT, *[1] * STEPS]
    return pictures, lengths, [torch.randn(BATCH, size, TEXT_WIDTH, device=DEVICE, dtype=DTYPE) for size in sizes]


@torch.inference_mode()
def main() -> int:
    """Computes everything twice, and prints how far it is apart."""
    where = f"{torch.cuda.get_device_name()}, bfloat16" if ON_GPU else "the CPU, float32"
    console.print(f"cudnn_sdpa {cudnn_sdpa.__version__} on {where}: {BATCH} pictures of ", end="")
    console.print(
        f"{min(LINES) * COLUMNS} to {MOST_LINES * COLUMNS} patches, width {WIDTH}; text of width {TEXT_WIDTH}"
    )
    if ON_GPU:
        torch.backends.cudnn.allow_tf32 = False  # PyTorch's convolution, for the comparison, would round to 10 bits
    else:
        torch.set_num_threads(1)  # so small a model that threads would wait for each other
    torch.manual_seed(SEED)
    with torch.device(DEVICE):
        model = Model().to(DTYPE)
    pictures, lengths, texts = draw_inputs()

    found = run(model, pictures, lengths, texts, OURS)
    in_float32 = (pictures.float(), lengths, [text.float() for text in texts])
    expected = run(deepcopy(model).float(), *in_float32, PYTORCH)
    errors = {name: float((found[name].float() - right).norm() / right.norm()) for name, right in expected.items()}

    table = Table("result", "error, as a share of the norm")
    for name, error in errors.items():
        table.add_row(name, f"{error:.1e}")
    console.print(table)
    if ON_GPU:
        info = plan_cache.info()
        counts = f"{info.builds} builds, {info.loads} loads, {info.hits} hits"
        console.print(f"{info.plans} plans served all norms and attention: {counts}.")
    agree = all(error <= TOLERANCE for error in errors.values())
    verdict = "every result agrees" if agree else "results DISAGREE"
    console.print(f"{verdict} with PyTorch in float32, within {TOLERANCE} of the norm")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
