"""Checks of an installed DeepEP: python tests/dispatch doctor|qp-layout|single-node|accept|prove.

Runs in the site's Python (3.9 or later) with the standard library; what needs PyTorch imports it.
"""
