"""The terms of the dVAE's evidence lower bound, and the relaxation that gradients pass through.

Ramesh et al. 2021, section 2.1 and appendices A.1 and A.3. Legend: B pictures, R side in pixels, G side of the grid of
codes, K codes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def logit_laplace(mapped: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
    """ln f(x | mu, b) = -ln(2 b x (1 - x)) - |logit(x) - mu| / b: a Laplace distribution of the pixels' logits.

    Its support is (0, 1), where pixels lie, unlike that of the Laplace distribution of an absolute error.

    Args:
        mapped: x in (0, 1), mapped pixels.
        mean: mu, of logits.
        log_scale: ln b.

    Returns:
        Log-density in nats, of the arguments' common shape.
    """
    jacobian = torch.log(mapped) + torch.log1p(-mapped)
    return -math.log(2) - log_scale - jacobian - (torch.logit(mapped) - mean).abs() * torch.exp(-log_scale)


def relax(logits: Tensor, temperature: Tensor | float) -> Tensor:
    """A sample of the Gumbel-softmax distribution (Jang et al. 2016, Maddison et al. 2016).

    Towards a temperature of 0 it becomes a one-hot sample of softmax(logits), towards infinity it becomes uniform.

    Args:
        logits: (B, K, G, G).
        temperature: tau, above 0.

    Returns:
        (B, K, G, G), each place's K values a point of the simplex.
    """
    # -ln of uniform numbers is exponential: `exponential_` draws one after the other on a CPU, at four times the time.
    # A uniform 0 becomes infinite and gets a weight of 0; a 1, to which 16-bit rounds, would become NaN unless clamped.
    exponential = torch.empty_like(logits).uniform_().log_().neg_().clamp_(min=torch.finfo(logits.dtype).tiny)
    return ((logits - exponential.log_()) / temperature).softmax(dim=1)


def kl_to_uniform(logits: Tensor) -> Tensor:
    """KL divergence from softmax(logits) to the uniform distribution of K codes: ln K less the entropy.

    Args:
        logits: (B, K, G, G).

    Returns:
        (B, G, G) in nats a place, between 0 and ln K.
    """
    log_q = logits.log_softmax(dim=1)
    return (log_q.exp() * log_q).sum(dim=1) + math.log(logits.shape[1])
