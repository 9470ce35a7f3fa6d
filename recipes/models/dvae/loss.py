"""The terms of the dVAE's evidence lower bound, and the relaxation through which gradients pass.

Ramesh et al. 2021, section 2.1 and appendices A.2 and A.3. Letters: B images, R side in pixels, G side of the grid of
codes, K codes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from recipes.models.blocks.formats import format_of


def logit_laplace(mapped: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
    """Log-density of the logit-Laplace distribution: ln f(x | mu, b) = -ln(2 b x (1 - x)) - |logit(x) - mu| / b.

    The logits of the pixels have a Laplace distribution. Unlike the plain Laplace distribution, whose likelihood is an
    absolute error, its support is (0, 1), the range of pixels.

    Args:
        mapped: x, pixels mapped into (0, 1).
        mean: mu, the mean of the logits.
        log_scale: ln b, the logarithm of the scale.

    Returns:
        Log-density in nats, of the common shape of the arguments.
    """
    jacobian = torch.log(mapped) + torch.log1p(-mapped)
    return -math.log(2) - log_scale - jacobian - (torch.logit(mapped) - mean).abs() * torch.exp(-log_scale)


def relax(logits: Tensor, temperature: Tensor | float) -> Tensor:
    """A sample of the Gumbel-softmax distribution (Jang et al. 2016, Maddison et al. 2016).

    As the temperature goes to 0, it becomes a one-hot sample of softmax(logits); as it goes to infinity, uniform.

    Args:
        logits: (B, K, G, G).
        temperature: tau, above 0.

    Returns:
        (B, K, G, G). The K values at each grid position are a point of the probability simplex.
    """
    # -ln of a uniform number is exponential. `exponential_` itself is sequential on a CPU and takes four times as long.
    # A uniform 0 becomes infinite and gets a weight of 0; a 1, which 16-bit rounding makes, would become NaN unclamped.
    exponential = torch.empty_like(logits).uniform_().log_().neg_().clamp_(min=torch.finfo(logits.dtype).tiny)
    return over_codes(torch.softmax, (logits - exponential.log_()) / temperature)


def kl_to_uniform(logits: Tensor) -> Tensor:
    """KL divergence from softmax(logits) to the uniform distribution over K codes: ln K minus the entropy.

    Args:
        logits: (B, K, G, G).

    Returns:
        (B, G, G) in nats per grid position, between 0 and ln K.
    """
    log_q = over_codes(torch.log_softmax, logits)
    return (log_q.exp() * log_q).sum(dim=1) + math.log(logits.shape[1])


def over_codes(softmax: Callable[..., Tensor], x: Tensor) -> Tensor:
    """A softmax over the codes that keeps the memory format, in both passes.

    PyTorch's return contiguous memory. In channels_last, that would copy all logits, which are by far the largest
    tensors of the network, to the other format and back.

    Args:
        softmax: `torch.softmax` or `torch.log_softmax`.
        x: (B, K, G, G).
    """
    if format_of(x) is torch.contiguous_format:
        return softmax(x, dim=1)
    return softmax(x.movedim(1, -1), dim=-1).movedim(-1, 1)
