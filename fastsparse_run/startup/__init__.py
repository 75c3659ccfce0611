"""The folder of `sitecustomize`."""
