"""Draws GB/s over token counts, with matplotlib."""

from .errors import UsageError


def library():
    """matplotlib.pyplot without a display. Raises UsageError where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise UsageError("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw(jobs, path, gpu):
    """Writes a picture of the jobs' bandwidth (facts["jobs"] of single-node) to path."""
    pyplot = library()
    kinds = sorted({job["kernels"] for job in jobs if job["bandwidth"]})
    if not kinds:
        raise UsageError("no job came as far as measuring: nothing to draw")
    figure, panels = pyplot.subplots(
        1, len(kinds), figsize=(6.4 * len(kinds), 4.8), squeeze=False, sharey=True
    )
    for panel, kind in zip(panels[0], kinds):
        measured = [job for job in jobs if job["kernels"] == kind and job["bandwidth"]]
        for number, job in enumerate(measured):
            tokens = [row["tokens"] for row in job["bandwidth"]]
            for what, style in (("dispatch", "-"), ("combine", "--")):
                panel.plot(
                    tokens, [row[what + "_gbs"] for row in job["bandwidth"]], style, marker="o",
                    color="C{}".format(number), label="{}, {} ranks".format(what, job["ranks"]),
                )  # fmt: skip
        copy = measured[0]["bandwidth"]
        panel.plot(
            [row["tokens"] for row in copy], [row["copy_gbs"] for row in copy], ":", color="gray",
            label="copy on the device",
        )  # fmt: skip
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xlabel("tokens a rank (hidden 7168, top-8, BF16)")
        panel.set_ylabel("GB/s received a rank")
        panel.set_title("{} ({})".format(kind, measured[0]["placement"]), fontsize=9)
        panel.grid(True, which="both", alpha=0.3)
        panel.legend(fontsize=8)
    figure.suptitle(gpu)
    figure.tight_layout()
    fresh = path.with_name(path.name + ".new.png")
    try:
        figure.savefig(fresh, dpi=120)
        fresh.replace(path)
    except OSError as error:
        raise UsageError("cannot write {}: {}".format(path, error.strerror)) from None
    finally:
        pyplot.close(figure)
