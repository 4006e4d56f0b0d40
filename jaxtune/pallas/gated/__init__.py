"""The gated activation of an MLP, and its backward in place."""


from jaxtune.pallas.gated.reference import ACTIVATIONS

__all__ = ["ACTIVATIONS"]
