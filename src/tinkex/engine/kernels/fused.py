"""The fused kernels of the model, as one module. Import it only where Triton is installed."""

from tinkex.engine.kernels.gates import add_product, gate_backward, gate_forward, shared_gate
from tinkex.engine.kernels.heads import heads_backward, heads_forward, store
from tinkex.engine.kernels.norms import add_norm_forward, norm_backward, norm_forward
from tinkex.engine.kernels.softmax import log_sums, softmax_gradient

__all__ = [
    "add_norm_forward",
    "add_product",
    "gate_backward",
    "gate_forward",
    "heads_backward",
    "heads_forward",
    "log_sums",
    "norm_backward",
    "norm_forward",
    "shared_gate",
    "softmax_gradient",
    "store",
]
