#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the form of messages (docs/contributing/style.md): messages.py SOURCE-ROOT.

A message is a text in a call that makes an error, a log line or a reason. The rules are:

  word     no literal has a word or phrase that the style page replaces
  begin    a message begins with a lower-case word, a placeholder or a proper name
  end      a message does not end with ":" or "."
  quotes   paths and names are quoted by in_quotes(), not by quotes in the text
  remedy   errors of the kinds in REMEDY have an instruction, such as ". Set MUSTER_TIMEOUT"

Texts that the calls receive from variables are not checked. errno_error() needs no instruction, because the system
gives the cause.
"""

import re
import sys
from pathlib import Path

WORDS = re.compile(
    r"\b(words|tells?|told|says?|said|hears?|heard|asks|asking|garbled|poison\w*|others|ways?|exists already"
    r"|(is|are|was|were) (none|no|not there)\b(?! (longer|more|less|later|larger|smaller))|is there|there (is|are) no"
    r"|No such file|goes on|gets on|takes in|taking in|look (what|whether|at)|looking at|comes? to|come of|lies"
    r"|travels?|first ranks?|cannot be had|in place of|has to|have to|was to be|were to be|shall|meanwhile|beside|beyond)\b(?! other)"
)
# Capitalized first words that are names.
PROPER = {"Muster", "Linux", "Unix", "Work", "Config", "Leftover"}
REMEDY = ("timeout", "out_of_space", "unsupported", "version")
INSTRUCTION = re.compile(
    r"(^|[.;] )(Buy|Call|Change|Check|Choose|Close|Copy|End|Fetch|Force|Free|Gather|Give|Initialize|Inspect|Install|Leave|Link|Lower|Make|Merge"
    r"|Mount|Move|Name|Pass|Raise|Read|Receive|Redirect|Release|Remove|Run|Save|Set|Split|Start|Take|Trace|Unset|Update|Use|Wait|Write)\b"
)
# Errors of these kinds without an instruction: a part of the message, and the reason.
WITHOUT_REMEDY = {
    "which Muster cannot read": "the message names the property, and no other form is known",
    "out of memory": "the caller adds the size and the remedy",
    "cannot be captured": "the message names the call to use",
    "packed elements of different slices": "no other plan is known for these shapes",
    "operation: cancelled": "the program has requested it",
    "SharedArena: needed {}, available": "the message names the limit",
    "tensor {}: needed {}, available": "the memory of a worker is that of its host",
    "merge {}: not supported": "no dtype is better than another one",
    "the ranks of a host share no memory": "internal: the caller uses another backend",
    "the ranks must share memory": "the place of the ranks cannot be changed",
    "shares no memory": "a reason, to which the caller adds the remedy",
    "more bytes than": "the size of the data cannot be changed",
    "no route reaches all ranks of the list": "a reason, to which the caller adds the remedy",
    "ranks. {}": "the last placeholder is the remedy",
    "{}: {}. {}": "the last placeholder is the remedy",
    "malformed metadata {}: {}": "the last placeholder has the remedy",
    "world(): ": "the variable behind it has the remedy",
    "mpi_group: ": "the variable behind it has the remedy",
    "tensor {} cannot be read: {}": "the reason is that of the omission",
    "cannot be compared completely: {}": "the last placeholder has the reason",
    "CUDA: {}: {}": "the driver gives the cause",
    "TCP: {}": "the system gives the cause",
}

CALL = re.compile(
    r"\b(?P<name>Error|error|\w*_error|error_of|log|refuse\w*|defect|fail\w*|lost|give_up|with_context|with_remedy|say|drop"
    r"|out_of_range_text)\s*\("
)
CONSTRUCTED = re.compile(r"\bError\s+\w+\(|\breturn \{(?=ErrorKind::)")
LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*"(?:\s*"(?:[^"\\\n]|\\.)*")*')
KIND = re.compile(r"ErrorKind::(\w+)")


def without_comments(text):
    """Returns the text with blanks in place of comments and includes, so that positions remain the same."""
    pattern = re.compile(r'"(?:[^"\\\n]|\\.)*"|R"\((?:.|\n)*?\)"|//[^\n]*|/\*(?:.|\n)*?\*/|^[ \t]*#[^\n]*', re.M)
    blank = lambda found: found.group() if found.group()[0] == '"' else re.sub(r"[^\n]", " ", found.group())
    return pattern.sub(blank, text)


def joined(literal):
    """Returns the text of adjacent literals."""
    return "".join(re.findall(r'"((?:[^"\\\n]|\\.)*)"', literal))


def arguments(text, begin):
    """Returns the text between a parenthesis or brace and its partner."""
    depth = 0
    for token in re.compile(r'"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\]|\\.)\'|[(){}\[\]]').finditer(text, begin):
        if token.group() in "([{":
            depth += 1
        elif token.group() in ")]}":
            depth -= 1
            if depth == 0:
                return text[begin + 1 : token.start()]
    return text[begin + 1 :]


def without_conditions(text):
    """Returns the text without comparisons with literals."""
    return re.sub(r'[=!]= *"(?:[^"\\\n]|\\.)*"', "", text)


def check_message(call, inside):
    """Yields the rules that the arguments of a call break, with the literal."""
    inside = without_conditions(inside)
    found = list(LITERAL.finditer(inside))
    texts = [joined(literal.group()) for literal in found]
    for literal, text in zip(found, texts):
        before = inside[: literal.start()].rstrip()
        after = inside[literal.end() :].lstrip()
        is_begin = not before or re.search(r"(ErrorKind::\w+|LogLevel::\w+),\s*(fmt::format\(|std::string\()?$", before)
        if is_begin and re.match(r"[A-Z][a-z]+\b(?![A-Z_])", text) and text.split()[0].strip(":,") not in PROPER:
            if call not in ("with_remedy",):
                yield "begin", text
        is_end = (not after or after[0] in ",)") and not re.match(r"\)*\s*\+", after)
        if is_end and re.search(r"(?<!\.\.)[:.]\s*$", text) and len(text) > 2:
            yield "end", text
        if re.search(r"'\{[^}]*\}'|\\\"\{[^}]*\}\\\"", text):
            yield "quotes", text
        if (after.startswith("+") and re.search(r"(?<!\w)('|\\\")$", text)) or (
            before.endswith("+") and re.match(r"('|\\\")(?![\w])", text)
        ):
            yield "quotes", text
    kinds = KIND.findall(inside)
    if call in ("errno_error", "file_error", "with_remedy") or not texts or not any(k in REMEDY for k in kinds):
        return
    whole = " ".join(texts)
    if not any(INSTRUCTION.search(text) for text in texts) and not any(part in whole for part in WITHOUT_REMEDY):
        yield "remedy", whole


# Files whose literals are programs for a shell.
SHELL = {"cmd_man.cpp"}


def check_file(path, text):
    """Yields line, rule and literal for each rule that a file breaks."""
    text = without_comments(text)
    line = lambda position: text.count("\n", 0, position) + 1
    for literal in LITERAL.finditer(text) if path.name not in SHELL else ():
        joined_text = joined(literal.group())
        if " " in joined_text.strip() and (word := WORDS.search(joined_text)):
            yield line(literal.start()), f"word '{word.group()}'", joined_text
    for found in list(CALL.finditer(text)) + list(CONSTRUCTED.finditer(text)):
        begin = found.end() - 1
        if text[begin] not in "({":
            continue
        for rule, literal in check_message(found.groupdict().get("name", "Error"), arguments(text, begin)):
            yield line(found.start()), rule, literal


def main(root):
    root = Path(root)
    files = sorted(
        path
        for folder in ("src", "tools")
        for pattern in ("*.cpp", "*.hpp")
        for path in (root / folder).rglob(pattern)
    )
    faults = {
        f"{path.relative_to(root)}:{line}: {rule}: {literal}"
        for path in files
        for line, rule, literal in check_file(path, path.read_text(encoding="utf-8"))
    }
    for fault in sorted(faults):
        print(fault)
    print(f"{len(files)} files, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
