"""The RMS norm of the residual stream, with a derivative in one pass over memory, which also adds the gradient that
comes to the stream by another way (`normed_stream`). The layers' norms call it in training."""

from jaxtune.pallas.normed_stream.api import has_kernel, implementations, normed_stream

__all__ = ["has_kernel", "implementations", "normed_stream"]
