"""The checks behind ci/check, ci/lock, ci/sources and ci/spack.

Data flows one way: spack.lock -> facts (lockfile) -> expectations (expect) and drift -> report.
"""
