# SPDX-License-Identifier: Apache-2.0
"""Prints the figures of a run as tables of plain text, at most 100 columns wide."""

from figures import size_name

# Series, and their names in the tables.
PEERS = [
    ("mpi-window", "MPI window"),
    ("mpi-gather", "MPI_Gather"),
    ("mpi-gather-in-place", "in place"),
    ("mpi-muster", "Muster/MPI"),
    ("gloo-gather", "gloo"),
    ("gloo-gather-object", "gloo obj"),
    ("modelopt-tensors", "MO tensor"),
    ("modelopt-configs-shm", "MO cfg"),
    ("modelopt-configs-files", "MO files"),
]


def milliseconds(seconds):
    if seconds is None:
        return "-"
    value = seconds * 1e3
    return f"{value:.3f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def times(value, of):
    if value is None or not of:
        return "-"
    ratio = value / of
    return f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}" if ratio < 100 else f"{ratio:.0f}"


def table(title, heads, rows):
    if not rows:
        return ""
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    lines = [title, "  ".join(head.rjust(width) for head, width in zip(heads, widths))]
    lines.append("-" * len(lines[1]))
    lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
    return "\n".join(lines) + "\n"


PLACEMENTS = ("floor first", "library first")


def against_floor(figures, key, ours, floors, what, placement=None):
    """Returns the seconds of the floor and of the library with one placement, measured in turns within one run."""
    get = getattr(figures, what)
    end = f"@{placement}" if placement else ""
    values = [get(key, name) for name in figures.cases[key]
              if name.startswith(floors) and (name.endswith(end) if end else "@" not in name)]
    values = [value for value in values if value is not None]
    mine = get(key, ours + end)
    return (min(values), mine) if values and mine is not None else None


def worst(figures, key, ours, floors, what):
    """Returns the placement that is worse for the library, so that lucky pages do not improve its figures."""
    pairs = [against_floor(figures, key, ours, floors, what, placement) for placement in PLACEMENTS]
    pairs = [pair for pair in pairs if pair] or [against_floor(figures, key, ours, floors, what)]
    return max(pairs, key=lambda pair: pair[1] / pair[0]) if pairs[0] else None


def gathers(figures, scenario, ours, floors, title):
    rows = []
    for key in figures.keys(scenario):
        access, read = (worst(figures, key, ours, floors, what) for what in ("access", "read"))
        if access is None or read is None:
            continue
        payload = key[2] * (key[1] - 1)
        cells = []
        for placement in PLACEMENTS:
            pair = against_floor(figures, key, ours, floors, "access", placement)
            cells.append(times(pair[1], pair[0]) if pair else "-")
        rows.append([str(key[1]), size_name(key[2]), milliseconds(access[0]), milliseconds(access[1]),
                     times(access[1], access[0]), f"{payload / access[1] / 1e9:.1f}", milliseconds(read[0]),
                     milliseconds(read[1]), times(read[1], read[0]), *cells, str(len(figures.cases[key][ours].access))])
    heads = ["ranks", "each", "floor ms", "muster ms", "x floor", "GB/s", "floor+read", "muster+read", "x floor",
             "x(a)", "x(b)", "n"]
    return table(title, heads, rows)


def peer_value(figures, key, name):
    # The user writes the copy into a window, so the better of the two copies shows the capability of the peer.
    return figures.best(key, name) if name == "mpi-window" else figures.access(key, name)


def peers(figures):
    by_ours, by_floor = [], []
    for key in figures.keys("gather"):
        values = [peer_value(figures, key, name) for name, _ in PEERS]
        ours, floor = figures.access(key, "muster"), figures.best(key, "floor")
        mpi_floor = figures.best(key, "mpi-floor")
        if not any(values):
            continue
        head = [str(key[1]), size_name(key[2])]
        by_ours.append(head + [times(value, ours) for value in values])
        by_floor.append(head + [times(value, mpi_floor if name.startswith("mpi") else floor)
                                for value, (name, _) in zip(values, PEERS)])
    heads = ["ranks", "each"] + [head for _, head in PEERS]
    return (table("Peers: time until the first rank has access, times that of Muster", heads, by_ours) + "\n"
            + table("Peers: the same, times the floor of the same run", heads, by_floor))


def small(figures):
    rows = []

    def row(what, key, series, batch=None):
        alone = figures.access(key, series)
        if alone is None:
            return
        round_alone, round_batch = figures.access(key, "round"), figures.access(key, "round-batch")
        batched = figures.access(key, batch) if batch else None
        rows.append([what, milliseconds(alone), times(alone, round_alone), milliseconds(batched),
                     times(batched, round_batch)])

    for key in figures.keys("small"):
        row(f"round of {key[1]} ranks", key, "round", "round-batch")
        row(f"configs, {size_name(key[2])}", key, "muster-configs", "muster-configs-batch")
        for name in ("gloo-gather-object", "modelopt-configs-shm", "modelopt-configs-files"):
            row(f"  {name}", key, name)
    for key in figures.keys("arena"):
        arenas = {name for name in figures.cases[key] if name.startswith("muster-arena-") and "batch" not in name}
        for name in sorted(arenas, key=lambda text: int(text.rsplit("-", 1)[1])):
            row(f"arena, {size_name(int(name.rsplit('-', 1)[1]))}", key, name, f"{name}-batch")
    for key in figures.keys("many"):
        row(f"configs, {key[2] // 1024} x 1 KiB", key, "muster-configs")
        for name in ("gloo-gather-object", "modelopt-configs-files"):
            row(f"  {name}", key, name)
    text = table("Small exchanges: alone (wake-up of the bench included), and back to back",
                 ["what", "alone ms", "rounds", "back to back ms", "rounds"], rows)
    for key in figures.keys("many"):
        ours = figures.access(key, "muster-configs")
        if ours is not None:
            count = key[2] // 1024
            text += (f"{count} tensors from each of {key[1]} ranks: {ours / count / key[1] * 1e6:.2f} us a tensor "
                     f"({ours / count / (key[1] - 1) * 1e6:.2f} us counting only those that came)\n")
            for name in ("modelopt-configs-files", "gloo-gather-object"):
                text += f"  {name} takes {times(figures.access(key, name), ours)} times as long\n"
    for key in figures.keys("small"):
        ours = figures.access(key, "muster-configs")
        for name in ("modelopt-configs-shm", "gloo-gather-object"):
            text += f"2 KiB: {name} takes {times(figures.access(key, name), ours)} times as long as muster-configs\n"
    return text


def spent(figures):
    rows = []
    for scenario, names in (("gather", ("floor-memcpy", "floor-nontemporal", "muster")),
                            ("first", ("fresh-pwrite", "fresh-mapped", "muster-first"))):
        for key in figures.keys(scenario):
            for name in names:
                series = figures.cases[key].get(name)
                if series is None or not series.first_rank:
                    continue
                cells = [str(key[1]), size_name(key[2]), name]
                for who in ("first_rank", "senders"):
                    cells += [f"{series.spent(who, 'faults'):.0f}", f"{series.spent(who, 'switches'):.0f}",
                              milliseconds(series.spent(who, "user") + series.spent(who, "system"))]
                rows.append(cells)
    return table("What one exchange took: page faults, context switches, CPU ms; of the first rank, of all senders",
                 ["ranks", "each", "series", "faults", "switches", "cpu", "faults", "switches", "cpu"], rows)


def phases(figures):
    rows = []
    for key, line in sorted(figures.phases.items()):
        scenario, ranks, size, _, rank = key
        for phase in line["phases"]:
            rows.append([scenario, str(ranks), size_name(size), str(rank), phase["name"],
                         milliseconds(phase["seconds"]), size_name(phase["bytes"]), str(phase["copies"]),
                         f"{phase['faults']:.0f}"])
    return table("Phases as the library tells them (medians)",
                 ["scenario", "ranks", "each", "rank", "phase", "ms", "bytes", "copies", "faults"], rows)


def tables(figures, with_phases=False):
    parts = [
        gathers(figures, "gather", "muster", "floor",
                "Gather, memory pooled: until the first rank has access, and until it has read every byte\n"
                "(x(a): with the floor's memory taken first, x(b): with Muster's; x floor: the worse of both)"),
        gathers(figures, "first", "muster-first", "fresh",
                "First exchange of a group: the same, against fresh memory"),
        peers(figures),
        small(figures),
        spent(figures),
        phases(figures) if with_phases else "",
    ]
    if figures.notes:
        parts.append("Not measured:\n" + "\n".join(f"  {note}" for note in figures.notes) + "\n")
    return "\n".join(part for part in parts if part.strip())
