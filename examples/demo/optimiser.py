"""Muon for the matrices, Adam for everything else, written so that a step can live inside a CUDA graph."""

import torch

ADAM_BY_NAME = ("embed_tokens", "position_embedding", "router", "input_proj", "patch_loss")


class Optimiser:
    """Matrices of one shape are orthogonalised together; the learning rate is a tensor that the caller fills."""

    def __init__(self, named, rate, decay=0.03, muon_rate=1.5):
        self.rate, self.decay, self.muon_rate = rate, decay, muon_rate
        self.by_shape, self.adam = {}, []
        for name, p in named:
            if p.ndim >= 2 and not any(part in name for part in ADAM_BY_NAME):
                self.by_shape.setdefault(tuple(p.shape[-2:]), []).append(p)
            else:
                self.adam.append(p)
        count = lambda p: p.shape[0] if p.ndim == 3 else 1
        self.momentum = {s: torch.zeros(sum(map(count, ps)), *s, device=rate.device) for s, ps in self.by_shape.items()}
        self.first = [torch.zeros_like(p) for p in self.adam]
        self.second = [torch.zeros_like(p) for p in self.adam]
        self.matrices = [p for p in self.adam if p.ndim >= 2]
        self.all = [p for ps in self.by_shape.values() for p in ps] + self.adam
        self.norm = torch.zeros((), device=rate.device)  # running gradient norm, for the log

    def state(self):
        return [*self.momentum.values(), *self.first, *self.second]

    @torch.no_grad()
    def step(self):
        """Clips the gradient to norm 1 (a step with a NaN is skipped) and updates every parameter."""
        grads = [p.grad for p in self.all]
        norm = torch.nn.utils.get_total_norm(grads)
        self.norm.lerp_(norm, 0.05)
        torch._foreach_mul_(grads, torch.nan_to_num((1 / (norm + 1e-6)).clamp(max=1.0), 0.0))
        for shape, ps in self.by_shape.items():
            self.muon(shape, ps)
        grads = [p.grad for p in self.adam]
        torch._foreach_lerp_(self.first, grads, 0.1)
        torch._foreach_mul_(self.second, 0.98)
        torch._foreach_addcmul_(self.second, grads, grads, 0.02)
        scale = torch._foreach_sqrt(self.second)
        torch._foreach_add_(scale, 1e-8)
        update = torch._foreach_div(self.first, scale)
        torch._foreach_mul_(update, self.rate)
        torch._foreach_mul_(self.matrices, 1 - self.rate * self.decay)
        torch._foreach_sub_(self.adam, update)

    def muon(self, shape, ps):
        """Momentum, then five Newton-Schulz iterations in bf16 that bring all singular values near 1."""
        g = torch.cat([p.grad if p.ndim == 3 else p.grad[None] for p in ps])
        momentum = self.momentum[shape].lerp_(g, 0.05)
        x = torch.lerp(g, momentum, 0.95)
        x = x.to(torch.bfloat16) if x.is_cuda else x
        tall = shape[0] > shape[1]
        x = x.transpose(1, 2) if tall else x
        x = x / (x.float().norm(dim=(1, 2), keepdim=True) + 1e-12).to(x.dtype)
        for _ in range(5):
            a = x @ x.transpose(1, 2)
            b = torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315)
            x = torch.baddbmm(x, b, x, beta=3.4445)
        x = (x.transpose(1, 2) if tall else x).float() * (self.rate * (self.muon_rate * 0.2 * max(shape) ** 0.5))
        updates, at = [], 0
        for p in ps:
            n = p.shape[0] if p.ndim == 3 else 1
            updates.append(x[at:at + n] if p.ndim == 3 else x[at])
            at += n
        torch._foreach_mul_(ps, 1 - self.rate * (self.muon_rate * self.decay))
        torch._foreach_sub_(ps, updates)
