# SPDX-License-Identifier: Apache-2.0
"""Finds places in C++ sources where one change can be switched on, and writes sources with several of them.

It works on text, not on a syntax tree. It finds statements and conditions by brackets, keywords and the spaces that
clang-format
puts around binary operators. A wrong guess costs a mutant that does not compile, and the campaign drops that.
"""
import random
import re
from collections import namedtuple

# Both forms evaluate MUSTER_MUTANT(n), which records that the place was evaluated. `text` is `original` with one
# change, on one line.
Mutant = namedtuple("Mutant", "path start end line last kind change text")

TOKEN = re.compile(
    r'(?P<space>\s+)|(?P<comment>//[^\n]*|/\*.*?\*/)|(?P<directive>^[ \t]*\#(?:[^\n\\]|\\.|\\\n)*)'
    r'|(?P<raw>(?:u8|u|U|L)?R"(?P<mark>[^(\s]*)\(.*?\)(?P=mark)")|(?P<string>(?:u8|u|U|L)?"(?:[^"\\\n]|\\.)*")'
    r"|(?P<number>(?:0[xX][0-9a-fA-F']+|\.?\d(?:[\w.']|[eE][+-])*))|(?P<char>(?:u8|u|U|L)?'(?:[^'\\\n]|\\.)+')|(?P<word>[A-Za-z_]\w*)"
    r"|(?P<sign><<=|>>=|<=>|->\*|\.\.\.|::|->|\+\+|--|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|.)",
    re.S | re.M)
Token = namedtuple("Token", "kind text start end")

COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
OPENING = {"(": ")", "[": "]", "{": "}"}
DECLARING = set("auto const constexpr constinit static thread_local inline extern typename struct class union enum unsigned signed int char bool "
                "long short float double void using typedef static_assert template namespace friend asm volatile public private protected".split())


def tokens_of(source):
    """Returns the tokens except spaces and comments, each with its offset."""
    found = []
    for match in TOKEN.finditer(source):
        kind = match.lastgroup if match.lastgroup != "mark" else "raw"
        if kind not in ("space", "comment"):
            found.append(Token(kind, match.group(), match.start(), match.end()))
    return found


class Finder:
    """All mutants of one source."""

    def __init__(self, path, source):
        self.path, self.source, self.tokens, self.mutants = path, source, tokens_of(source), []
        self.line_starts = [0] + [match.end() for match in re.finditer("\n", source)]
        self.close = {}
        opened = []
        for index, token in enumerate(self.tokens):
            if token.kind != "sign":
                continue
            if token.text in OPENING:
                opened.append(index)
            elif token.text in OPENING.values():
                if not opened or OPENING[self.tokens[opened[-1]].text] != token.text:
                    raise ValueError(f"{path}:{self.line(token.start)}: brackets do not match, because of a macro perhaps")
                self.close[opened.pop()] = index
        self.container(0, len(self.tokens))

    def line(self, offset):
        low, high = 0, len(self.line_starts)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.line_starts[middle] <= offset else (low, middle)
        return low + 1

    def text(self, index):
        return self.tokens[index].text if index < len(self.tokens) else ""

    # Namespaces and types, which contain function bodies.
    def container(self, begin, end):
        head, index = begin, begin
        while index < end:
            text = self.text(index)
            if self.tokens[index].kind == "directive" or text == ";":
                head = index + 1
            elif text in ("(", "["):
                index = self.close[index]
            elif text == "{":
                kind = self.brace(head, index)
                if kind == "container":
                    self.container(index + 1, self.close[index])
                elif kind == "function":
                    words = [token.text for token in self.tokens[head:index]]
                    if not {"constexpr", "consteval"} & set(words):
                        self.block(index, self.is_void(head, index))
                index = self.close[index]
                if kind in ("container", "function"):
                    head = index + 1
            index += 1

    def brace(self, head, index):
        level, words, parenthesis, colon, arrow = head, [], None, False, False
        while level < index:
            text = self.text(level)
            words.append(text)
            if text == "(" and self.text(level - 1) != "alignas":
                parenthesis = level
            colon |= text == ":" and parenthesis is not None
            arrow |= text == "->" and parenthesis is not None
            level = self.close[level] + 1 if text in OPENING else level + 1
        before = self.text(index - 1)
        if parenthesis is None:
            return "container" if {"namespace", "struct", "class", "union", "extern"} & set(words) and before != "=" else "value"
        if before in (")", "const", "noexcept", "override", "final", "}", "try") or (arrow and not colon):
            return "function" if before != "}" or colon else "value"
        return "value"

    def is_void(self, head, index):
        while head < index and self.text(head) != "(":
            if self.text(head) == "void" and self.text(head + 1) != "*":
                return True
            head = self.close[head] + 1 if self.text(head) in OPENING else head + 1
        return False

    # Statements.
    def block(self, opened, is_void=False):
        index, end = opened + 1, self.close[opened]
        while index < end:
            index = self.statement(index, is_void)

    def statement(self, index, is_void):
        text = self.text(index)
        if self.tokens[index].kind == "directive":
            return index + 1
        if text == "{":
            self.block(index, is_void)
            return self.close[index] + 1
        if text in ("if", "while", "switch", "for"):
            fixed = self.text(index + 1) == "constexpr"
            opened = index + 2 if fixed else index + 1
            self.head(text, opened, fixed)
            index = self.statement(self.close[opened] + 1, is_void)
            return self.statement(index + 1, is_void) if text == "if" and self.text(index) == "else" else index
        if text in ("do", "try"):
            index = self.statement(index + 1, is_void)
            while self.text(index) == "catch":
                index = self.statement(self.close[index + 1] + 1, is_void)
            if text == "do":
                self.condition("while", index + 2, self.close[index + 1])
                index = self.close[index + 1] + 2
            return index
        if text in ("case", "default"):
            while self.text(index) != ":":
                index = self.close[index] + 1 if self.text(index) in OPENING else index + 1
            return index + 1
        return self.simple(index, is_void)

    def simple(self, begin, is_void):
        index, has_lambda, equals, braced = begin, False, None, False
        while self.text(index) != ";":
            if index >= len(self.tokens) or self.text(index) in OPENING.values():
                raise ValueError(f"{self.path}:{self.line(self.tokens[begin].start)}: a statement without an end")
            if self.text(index) == "=" and equals is None:
                equals = index
            if self.text(index) in OPENING:
                has_lambda |= self.lambdas(index)
                braced |= self.text(index) == "{"
                index = self.close[index]
            index += 1
        first, keyword = self.text(begin), self.text(begin) in DECLARING
        if first == "[" or first in ("break", "continue", "goto", "throw", "delete", "using", "typedef", "static_assert") or begin == index:
            return index + 1
        if any(token.kind == "directive" for token in self.tokens[begin:index]):
            return index + 1
        if first == "return":
            if not has_lambda:
                self.changes(begin + 1, index, begin, index + 1, "{{ if (MUSTER_MUTANT({n})) {changed} {original} }}")
        elif keyword or self.declares(begin, index):
            if equals is not None and not has_lambda and self.text(equals + 1) not in ("{", "[") and \
                    not {"static", "constexpr", "thread_local", "using", "enum", "struct"} & {token.text for token in self.tokens[begin:equals]}:
                self.changes(equals + 1, index, equals + 1, index, "(MUSTER_MUTANT({n}) ? ({changed}) : ({original}))")
        else:
            if not has_lambda:
                self.changes(begin, index, begin, index + 1, "{{ if (MUSTER_MUTANT({n})) {changed} else {original} }}")
            self.add(begin, index + 1, begin, "statement removed", "removed: " + self.one_line(begin, index), "{{ if (!MUSTER_MUTANT({n})) {original} }}")
            if is_void:
                self.add(begin, index + 1, begin, "early return", "returns before: " + self.one_line(begin, index), "{{ if (MUSTER_MUTANT({n})) return; {original} }}")
        return index + 1

    def declares(self, begin, end):
        index = begin
        while index < end and self.tokens[index].kind == "word":
            index += 1
            if self.text(index) == "<" and self.tokens[index].start == self.tokens[index - 1].end:
                depth = 1
                while depth and index < end:
                    index += 1
                    depth += {"<": 1, ">": -1}.get(self.text(index), 0)
                index += 1
            if self.text(index) == "::":
                index += 1
                continue
            break
        words = index
        while self.text(index) in ("*", "&", "&&", "const"):
            index += 1
        return words > begin and index < end and self.tokens[index].kind == "word" and self.tokens[index - 1].text not in ("::",)

    def lambdas(self, opened):
        """Visits the bodies of lambdas in a bracket, whose statements are separate places. Returns whether there are any."""
        found, index = False, opened
        while index < self.close[opened] or index == opened:
            if self.text(index) == "{":
                before, back = self.text(index - 1), index - 1
                while back > 0 and (self.tokens[back].kind == "word" or self.text(back) in ("::", "<", ">", "*", "&")):
                    back -= 1
                if before in (")", "]", "mutable", "noexcept") or self.text(back) == "->":
                    found = True
                    self.block(index)
                    index = self.close[index]
                    if index >= self.close[opened]:
                        break
            index += 1
        return found

    def head(self, keyword, opened, fixed):
        end = self.close[opened]
        parts, index = [opened + 1], opened + 1
        while index < end:
            if self.text(index) == ";":
                parts.append(index + 1)
            index = self.close[index] + 1 if self.text(index) in OPENING else index + 1
        if self.lambdas(opened) or fixed or keyword == "switch" or (keyword == "for" and len(parts) != 3):
            return
        begin = parts[1] if keyword == "for" else parts[-1]
        self.condition(keyword, begin, parts[2] - 1 if keyword == "for" else end)

    def condition(self, keyword, begin, end):
        if begin >= end or self.text(begin) in DECLARING or (self.declares(begin, end) and any(self.text(at) == "=" for at in range(begin, end))):
            return
        self.changes(begin, end, begin, end, "(MUSTER_MUTANT({n}) ? ({changed}) : ({original}))")
        if keyword == "if":
            self.add(begin, end, begin, "check removed", f"never true: {self.one_line(begin, end)}", "(!MUSTER_MUTANT({n}) && ({original}))")

    # Changes of one token.
    def changes(self, begin, end, first, last, form):
        strings = any(token.kind in ("string", "raw") for token in self.tokens[begin:end])
        for index in range(begin, end):
            token = self.tokens[index]
            spaced = index > begin and token.start > self.tokens[index - 1].end and self.tokens[index + 1].start > token.end
            kind = None
            if spaced and token.text in COMPARISONS:
                kind, new = "comparison", COMPARISONS[token.text]
            elif spaced and token.text in ("&&", "||"):
                kind, new = "logic", {"&&": "||", "||": "&&"}[token.text]
            elif spaced and token.text in ("+", "-") and not strings:
                kind, new = "offset", f"{token.text} 1 {token.text}"
            elif token.kind == "number" and re.fullmatch(r"0|[1-9]\d*", token.text) and (index == begin or self.text(index - 1) != "<" or spaced):
                kind, new = "constant", str(int(token.text) + 1)
            elif token.text in ("true", "false"):
                kind, new = "constant", {"true": "false", "false": "true"}[token.text]
            if kind:
                self.add(first, last, index, kind, f"{token.text} -> {new} in: {self.one_line(begin, end)}", form, self.one_line(first, last, {index: new}))

    def one_line(self, begin, end, replaced={}):
        parts, previous = [], None
        for index in range(begin, end):
            token = self.tokens[index]
            if previous is not None and token.start > previous:
                parts.append(" ")
            parts.append(replaced.get(index, token.text))
            previous = token.end
        return "".join(parts)

    def add(self, first, last, at, kind, change, form, changed=""):
        start, end = self.tokens[first].start, self.tokens[last - 1].end
        if "\n" not in changed:  # a raw string may have one
            text = form.replace("{changed}", "\0").replace("{original}", "\1")
            self.mutants.append(Mutant(self.path, start, end, self.line(self.tokens[at].start), self.line(end), kind, change,
                                       text.replace("\0", changed.replace("{", "{{").replace("}", "}}"))))


def find_mutants(path, source):
    return Finder(path, source).mutants


def select(sources, seeds, count):
    """Returns `count` mutants per seed of {path: source}. No two mutants overlap. Each is a random line, then a kind of
    change, then a change of that kind.
    """
    lines, by_line = [], {}
    for path in sorted(sources):
        for mutant in find_mutants(path, sources[path]):
            by_line.setdefault((path, mutant.line), {}).setdefault(mutant.kind, []).append(mutant)
        lines += [(path, number) for number in range(1, sources[path].count("\n") + 2)]
    chosen = []
    for turn, seed in enumerate(seeds, 1):
        chance, places = random.Random(seed), lines[:]
        chance.shuffle(places)
        for place in places:
            if len(chosen) == turn * count:
                break
            kinds = by_line.get(place)
            if kinds:
                mutant = chance.choice(kinds[chance.choice(sorted(kinds))])
                if not any(other.path == mutant.path and other.start < mutant.end and mutant.start < other.end for other in chosen):
                    chosen.append(mutant)
    return chosen


def rewrite(path, source, numbered, header):
    """Returns `source` with the mutants of {number: mutant}, each of which MUSTER_MUTANT switches on. Lines keep their numbers."""
    for number, mutant in sorted(numbered.items(), key=lambda item: -item[1].start):
        original = source[mutant.start:mutant.end]
        source = source[:mutant.start] + mutant.text.format(n=number).replace("\1", original) + source[mutant.end:]
    keys = "".join(f'[[gnu::weak, gnu::visibility("hidden")]] int muster_mutant_key_{number} = {number};\n' for number in sorted(numbered))
    return f'#include "{header}"\nextern "C" {{\n{keys}}}\n#line 1 "{path}"\n{source}'
