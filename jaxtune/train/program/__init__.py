"""The compiled train step: its loss, its gradients, its update, and the cache of compiled programs."""
