"""The same decoder in PyTorch, to train against eejax's: a plain `nn.Module` of Llama's kind."""

from __future__ import annotations

from typing import Any


def unavailable(cuda: bool = True) -> str | None:
    """Return why PyTorch cannot be a peer; None if it can."""
    try:
        import torch
    except ImportError:
        return "torch: not installed"
    if cuda and not torch.cuda.is_available():
        return "torch: without CUDA"
    return None


def build(size, device: str) -> Any:
    """Return the model of a `card_programs.ModelSize`, its head tied, with random weights."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class PeerRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(size.width))

        def forward(self, x):
            # PyTorch fuses it only for one dtype.
            return F.rms_norm(x, (size.width,), self.weight.to(x.dtype), 1e-5)

    class PeerLayer(nn.Module):
        def __init__(self):
            super().__init__()

            def linear(a, b):
                return nn.Linear(a, b, bias=False)

            self.attention_norm, self.mlp_norm = PeerRMSNorm(), PeerRMSNorm()
            self.qkv = linear(size.width, 3 * size.width)
            self.out = linear(size.width, size.width)
            self.gate, self.up = linear(size.width, size.inner), linear(size.width, size.inner)
            self.down = linear(size.inner, size.width)

        def forward(self, x, cos, sin):
            b, t, d = x.shape
            qkv = self.qkv(self.attention_norm(x)).view(b, t, 3, size.heads, -1).transpose(1, 3)
            q, k, v = qkv.unbind(2)
            q, k = (a * cos + turned(a) * sin for a in (q, k))
            y = F.scaled_dot_product_attention(q, k.to(v.dtype), v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
            h = self.mlp_norm(x)
            return x + self.down(F.silu(self.gate(h)) * self.up(h))

    def turned(a):
        half = a.shape[-1] // 2
        return torch.cat((-a[..., half:], a[..., :half]), -1)

    class PeerDecoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(size.vocabulary, size.width)
            self.layers = nn.ModuleList(PeerLayer() for _ in range(size.layers))
            self.norm = PeerRMSNorm()
            nn.init.normal_(self.embed.weight, std=0.02)

        def forward(self, tokens, labels):
            x = self.embed(tokens)
            dtype = torch.get_autocast_dtype(x.device.type)
            x = x.to(dtype)
            width = size.width // size.heads
            rates = 1e4 ** -(torch.arange(0, width, 2, device=x.device) / width)
            angles = torch.outer(torch.arange(tokens.shape[1], device=x.device), rates)
            angles = torch.cat((angles, angles), -1)
            cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
            for layer in self.layers:
                x = layer(x, cos, sin)
            logits = F.linear(self.norm(x), self.embed.weight)
            return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    return PeerDecoder().to(device)


def trained(size, batch: int, length: int, repeats: int, device: str) -> dict[str, Any]:
    """Time steps of AdamW under autocast to bfloat16, gradients clipped by their global norm."""
    import numpy as np
    import torch

    from eejax.experiments.gpu_check.check import median_seconds

    model = build(size, device)
    adam = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=device == "cuda"
    )
    tokens = np.random.default_rng(0).integers(0, size.vocabulary, (batch, length))
    tokens = torch.tensor(tokens, device=device)
    labels = torch.roll(tokens, -1, 1)
    losses = []

    def step() -> None:
        adam.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss = model(tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        losses.append(loss.item())  # waits for the device

    seconds = median_seconds(step, repeats)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return dict(
        ms=1e3 * seconds,
        tokens_per_second=batch * length / seconds,
        peak_bytes=peak,
        losses=losses,
        peer_device=torch.cuda.get_device_name() if device == "cuda" else device,
        torch=torch.__version__,
    )
