# SPDX-License-Identifier: Apache-2.0
"""The figures of a run: the lines of all programs, merged by case."""

import json
import statistics
from dataclasses import dataclass, field

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_size(text):
    """Parses a size: '64K' is 65536."""
    unit = text[-1:].upper()
    number = int(text[:-1]) * UNITS[unit] if unit in UNITS else int(text)
    if number <= 0:
        raise ValueError(f"{text}: sizes are positive")
    return number


def size_name(size):
    for unit in ("G", "M", "K"):
        if size >= UNITS[unit] and size % UNITS[unit] == 0:
            return f"{size // UNITS[unit]} {unit}iB"
    return f"{size} B"


@dataclass
class Series:
    access: list = field(default_factory=list)
    read: list = field(default_factory=list)
    first_rank: list = field(default_factory=list)
    senders: list = field(default_factory=list)

    def median_access(self):
        return statistics.median(self.access)

    def median_read(self):
        return statistics.median(self.read) if self.read else None

    def spent(self, who, what):
        """Returns the median over rounds of the usage per repetition, of the root or of all senders."""
        values = [one[what] for one in getattr(self, who)]
        return statistics.median(values) if values else None


class Figures:
    """Figures by (scenario, ranks, bytes) and series.

    The floor of MPI is separate from that of the library, because each ratio is computed within one run of one program.
    """

    def __init__(self):
        self.lines = []
        self.notes = []
        self.cases = {}
        self.phases = {}

    def add(self, line, program):
        line["program"] = program
        self.lines.append(line)
        key = (line["scenario"], line["ranks"], line["bytes"])
        if "skipped" in line:
            self.note(f"{line['series']} ({line['scenario']}, {line['ranks']} ranks): {line['skipped']}")
        elif "phases" in line:
            self.phases[(*key, line["series"], line["rank"])] = line
        elif line["access"]:
            name = f"mpi-{line['series']}" if program == "mpi_peer" and line["series"].startswith("floor") \
                else line["series"]
            names = [name, f"{name}@{line['placement']}"] if "placement" in line else [name]
            for one in names:
                self.merge(self.cases.setdefault(key, {}).setdefault(one, Series()), line)

    @staticmethod
    def merge(series, line):
        series.access += line["access"]
        series.read += line.get("read", [])
        for who in ("first_rank", "senders"):
            if who in line:
                getattr(series, who).append(line[who])

    def note(self, text):
        if text not in self.notes:
            self.notes.append(text)

    def keys(self, scenario):
        return sorted(key for key in self.cases if key[0] == scenario)

    def access(self, key, series):
        found = self.cases.get(key, {}).get(series)
        return found.median_access() if found else None

    def read(self, key, series):
        found = self.cases.get(key, {}).get(series)
        return found.median_read() if found else None

    def best(self, key, prefix, what="access"):
        """Returns the best median of all series with this prefix: a floor with the best memory, or a peer with two
        methods."""
        values = [getattr(self, what)(key, name) for name in self.cases.get(key, {}) if name.startswith(prefix)]
        values = [value for value in values if value is not None]
        return min(values) if values else None

    def save(self, path):
        with open(path, "w", encoding="utf-8") as file:
            for line in self.lines:
                file.write(json.dumps(line) + "\n")
            for note in self.notes:
                file.write(json.dumps({"note": note}) + "\n")

    @staticmethod
    def load(path):
        figures = Figures()
        with open(path, encoding="utf-8") as file:
            for text in file:
                line = json.loads(text)
                if "note" in line:
                    figures.note(line["note"])
                else:
                    figures.add(line, line["program"])
        return figures
