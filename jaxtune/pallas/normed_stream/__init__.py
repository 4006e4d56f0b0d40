"""RMS norm of the residual stream, whose derivative also adds the gradient that comes to the stream by another way."""

from jaxtune.pallas.normed_stream.api import has_kernel, implementations, normed_stream

__all__ = ["has_kernel", "implementations", "normed_stream"]
