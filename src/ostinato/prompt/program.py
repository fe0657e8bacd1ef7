"""Prompt programs: an ordinary Python function as a schema.

    @prompt_program
    def trip(days: Annotated[str, 4], city: Literal["rome", "paris"], children: bool = False):
        with system:
            "You plan trips."
        f"The trip takes {days} days."
        if children:
            "Children come along."
        match city:
            case "rome":
                "It goes to Rome."
            case "paris":
                "It goes to Paris."

    engine.register(trip.schema)
    engine.generate(trip.prompt(3, "rome").then(user("What shall we see?")))

The function is never run. Its source says what the schema is: a string is text (a line of its own), an `if`
a module, `if`/`else` and `match` a union, a call of another program a nested module, `with system:` (`user`,
`assistant`) a turn, and a field of an f-string a parameter, whose length in tokens the argument's annotation
gives: `Annotated[str, 4]`. Conditions are ordinary Python over the arguments and the function's globals.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, TracebackType
from typing import Annotated, Any, cast, get_args, get_origin, get_type_hints

from ostinato.prompt.schema import (
    ROLES,
    Child,
    Import,
    Module,
    Parameter,
    Role,
    RoleName,
    Schema,
    SchemaError,
    SchemaPrompt,
    Text,
    Union,
)


class _Block:
    """What `with system:` names; it exists so that the source of a program is valid Python."""

    def __init__(self, role: RoleName) -> None:
        self.role: RoleName = role

    def __enter__(self) -> None:
        raise TypeError(f"`with {self.role}:` belongs into a function with @prompt_program")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


system = _Block("system")
user = _Block("user")
assistant = _Block("assistant")

Variables = Mapping[str, Any]
Choice = Callable[[Variables], list[Import]]
"""What a part of a program imports, given the values of the function's arguments."""


@dataclass
class _Compiled:
    """A part of a program: its nodes, what it imports, and the parameters it has."""

    children: list[Child] = field(default_factory=list[Child])
    choices: list[Choice] = field(default_factory=list[Choice])
    arguments: dict[str, str] = field(default_factory=dict[str, str])
    """The variable of each parameter, by the parameter's name."""
    names: set[str] = field(default_factory=set[str])

    def values(self, variables: Variables) -> tuple[tuple[str, str], ...]:
        return tuple((name, str(variables[variable])) for name, variable in self.arguments.items())

    def imports(self, variables: Variables) -> tuple[Import, ...]:
        return tuple(each for choice in self.choices for each in choice(variables))

    def unique(self, name: str) -> str:
        """`name`, with a number if another module or parameter has it."""
        unique, number = name, 1
        while unique in self.names:
            number += 1
            unique = f"{name}-{number}"
        self.names.add(unique)
        return unique


class PromptProgram:
    """A function compiled to a schema; made by `prompt_program`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.name = function.__name__
        self.__doc__ = function.__doc__
        self.signature = inspect.signature(function)
        self._compiling = False

    @functools.cached_property
    def schema(self) -> Schema:
        """The schema, compiled on first use, so that programs may call programs defined later."""
        return Schema(self.name, tuple(self._compiled.children), where=self._where)

    def prompt(self, *args: Any, **kwargs: Any) -> SchemaPrompt:
        """The prompt that the function makes of these arguments."""
        variables = self._bound(*args, **kwargs)
        compiled = self._compiled
        return SchemaPrompt(self.name, compiled.imports(variables), compiled.values(variables), self._where)

    __call__ = prompt

    @property
    def compiled(self) -> _Compiled:
        """For programs that call this one."""
        return self._compiled

    def _bound(self, *args: Any, **kwargs: Any) -> Variables:
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise SchemaError(
                f"{self.name}{self.signature} does not take these arguments: {error}."
            ) from None
        bound.apply_defaults()
        return bound.arguments

    @property
    def _where(self) -> str:
        code = self._function.__code__
        return f"{code.co_filename}, line {code.co_firstlineno}"

    @functools.cached_property
    def _compiled(self) -> _Compiled:
        if self._compiling:
            raise SchemaError(f"The prompt program '{self.name}' calls itself, without end.", self._where)
        self._compiling = True
        try:
            return _Compiler(self._function, self.signature).compiled()
        finally:
            self._compiling = False


def prompt_program(function: Callable[..., Any]) -> PromptProgram:
    """Make a function a `PromptProgram`; see the module's documentation for what may be in it."""
    return PromptProgram(function)


class _Compiler:
    def __init__(self, function: Callable[..., Any], signature: inspect.Signature) -> None:
        self._function = function
        self._file = function.__code__.co_filename
        self._signature = signature
        closure = inspect.getclosurevars(function)
        self._globals = {**function.__globals__, **closure.nonlocals}

    def compiled(self) -> _Compiled:
        try:
            lines, first = inspect.getsourcelines(self._function)
        except (OSError, TypeError):
            raise SchemaError(
                f"The source of '{self._function.__name__}' is not to be had. Define prompt programs in a file."
            ) from None
        tree = ast.parse(textwrap.dedent("".join(lines)))
        ast.increment_lineno(tree, first - 1)
        definition = tree.body[0]
        if not isinstance(definition, ast.FunctionDef):
            raise self._error(definition, "This is no ordinary function. Write def.")
        return self._block(definition.body, top=True)

    @functools.cached_property
    def _lengths(self) -> dict[str, int]:
        """Tokens that the annotations of arguments allow for."""
        lengths: dict[str, int] = {}
        hints = get_type_hints(self._function, localns=self._globals, include_extras=True)
        for name in self._signature.parameters:
            hint = hints.get(name)
            if get_origin(hint) is Annotated:
                numbers = [each for each in get_args(hint)[1:] if type(each) is int]
                if numbers:
                    lengths[name] = numbers[0]
        return lengths

    def _block(
        self, body: Sequence[ast.stmt], *, top: bool = False, into: _Compiled | None = None
    ) -> _Compiled:
        made = into or _Compiled()
        for index, statement in enumerate(body):
            match statement:
                case ast.Pass():
                    pass
                case ast.Expr(ast.Constant(str(text))):
                    # As everywhere in Python the first string of a function is its documentation.
                    if not (top and index == 0):
                        self._add_text(made, _lines(text))
                case ast.Expr(ast.JoinedStr() as template):
                    self._template(made, template)
                case ast.Expr(ast.Call() as call):
                    self._call(made, call)
                case ast.If():
                    self._branches(made, statement)
                case ast.Match():
                    self._match(made, statement)
                case ast.With():
                    self._turn(made, statement)
                case _:
                    raise self._error(
                        statement,
                        f"A prompt program cannot hold this ({type(statement).__name__}): it is made of strings, "
                        "f-strings, if, match, `with system:` and calls of other programs. Compute values before "
                        "the call and pass them as arguments.",
                    )
        return made

    def _add_text(self, made: _Compiled, text: str) -> None:
        if made.children and isinstance(last := made.children[-1], Text):
            made.children[-1] = Text(last.text + text)
        elif text:
            made.children.append(Text(text))

    def _template(self, made: _Compiled, template: ast.JoinedStr) -> None:
        fields = [value for value in template.values if isinstance(value, ast.FormattedValue)]
        text = "".join(
            str(value.value) if isinstance(value, ast.Constant) else "\0" for value in template.values
        )
        first, *rest = _lines(text).split("\0")
        self._add_text(made, first)
        for value, after in zip(fields, rest, strict=True):
            made.children.append(self._parameter(made, value))
            self._add_text(made, after)

    def _parameter(self, made: _Compiled, value: ast.FormattedValue) -> Parameter:
        name = value.value.id if isinstance(value.value, ast.Name) else ""
        if name not in self._signature.parameters or value.conversion != -1 or value.format_spec:
            raise self._error(
                value,
                "A field must be one argument of the function, as it is: {name}. Compute what it says before "
                "the call.",
            )
        if name not in self._lengths:
            raise self._error(
                value,
                f"The field {{{name}}} needs a length in tokens. Annotate the argument: "
                f"{name}: Annotated[str, 20].",
            )
        parameter = made.unique(name)
        made.arguments[parameter] = name
        return Parameter(parameter, self._lengths[name], where=self._at(value))

    def _call(self, made: _Compiled, call: ast.Call) -> None:
        program = self._value(call.func)
        if not isinstance(program, PromptProgram):
            raise self._error(
                call,
                f"{ast.unparse(call.func)} is no prompt program. Put @prompt_program before its definition.",
            )
        inner = program.compiled
        name = made.unique(program.name)
        made.children.append(Module(name, tuple(inner.children), where=self._at(call)))
        bind = ast.Call(ast.Name("__bind__", ast.Load()), call.args, call.keywords)
        code = self._code(ast.copy_location(bind, call))
        scope = {**self._globals, "__bind__": program._bound}  # pyright: ignore[reportPrivateUsage]

        def choose(variables: Variables) -> list[Import]:
            bound = cast("Variables", eval(code, scope, dict(variables)))
            return [Import(name, inner.values(bound), inner.imports(bound))]

        made.choices.append(choose)

    def _branches(self, made: _Compiled, statement: ast.If) -> None:
        """`if` to a module; with `elif` or `else` to a union."""
        tests: list[CodeType | None] = []
        names: list[str] = []
        bodies: list[Sequence[ast.stmt]] = []
        rest: list[ast.stmt] = [statement]
        while len(rest) == 1 and isinstance(branch := rest[0], ast.If):
            tests.append(self._code(branch.test))
            names.append(_slug(ast.unparse(branch.test), "if"))
            bodies.append(branch.body)
            rest = branch.orelse
        if rest:
            tests.append(None)
            names.append("not-" + names[0] if len(names) == 1 else "else")
            bodies.append(rest)

        def pick(variables: Variables) -> int | None:
            for index, test in enumerate(tests):
                if test is None or eval(test, self._globals, dict(variables)):
                    return index
            return None

        self._add_members(made, statement, names, bodies, pick)

    def _match(self, made: _Compiled, statement: ast.Match) -> None:
        names: list[str] = []
        for case in statement.cases:
            if case.guard is not None:
                raise self._error(case.guard, "A case cannot have a condition. Use if and elif.")
            names.append(self._pattern_name(case.pattern))
        # Python decides which case it is: each body is replaced by its number.
        cases = [
            ast.match_case(case.pattern, None, [ast.Return(ast.Constant(index))])
            for index, case in enumerate(statement.cases)
        ]
        chooser = ast.parse(f"def __choose__({', '.join(self._signature.parameters)}): pass").body[0]
        assert isinstance(chooser, ast.FunctionDef)
        chooser.body = [ast.copy_location(ast.Match(statement.subject, cases), statement)]
        module = ast.fix_missing_locations(ast.Module([chooser], []))
        scope = dict(self._globals)
        exec(compile(module, self._file, "exec"), scope)
        choose = cast("Callable[..., int | None]", scope["__choose__"])
        self._add_members(
            made, statement, names, [case.body for case in statement.cases], lambda values: choose(**values)
        )

    def _pattern_name(self, pattern: ast.pattern) -> str:
        match pattern:
            case ast.MatchValue() | ast.MatchSingleton():
                return _slug(ast.unparse(pattern), "case")
            case ast.MatchOr(patterns):
                return "-or-".join(self._pattern_name(each) for each in patterns)
            case ast.MatchAs(None, None):
                return "otherwise"
            case _:
                raise self._error(pattern, 'A case must be a value, values with |, or _: case "rome":.')

    def _add_members(
        self,
        made: _Compiled,
        statement: ast.stmt,
        names: Sequence[str],
        bodies: Iterable[Sequence[ast.stmt]],
        pick: Callable[[Variables], int | None],
    ) -> None:
        inners = [self._block(body) for body in bodies]
        unique = [made.unique(name) for name in names]
        where = self._at(statement)
        modules = tuple(
            Module(name, tuple(inner.children), where=where)
            for name, inner in zip(unique, inners, strict=True)
        )
        made.children.append(modules[0] if len(modules) == 1 else Union(modules, where=where))

        def choose(variables: Variables) -> list[Import]:
            index = pick(variables)
            if index is None:
                return []
            inner = inners[index]
            return [Import(unique[index], inner.values(variables), inner.imports(variables))]

        made.choices.append(choose)

    def _turn(self, made: _Compiled, statement: ast.With) -> None:
        block = self._value(statement.items[0].context_expr) if len(statement.items) == 1 else None
        if not isinstance(block, _Block):
            raise self._error(statement, f"`with` opens a turn: write `with {':` or `with '.join(ROLES)}:`.")
        outer, made.children = made.children, []
        self._block(statement.body, into=made)
        children, made.children = made.children, outer
        if children and isinstance(last := children[-1], Text):
            children[-1] = Text(last.text.rstrip("\n"))
        made.children.append(Role(block.role, tuple(children), where=self._at(statement)))

    def _value(self, expression: ast.expr) -> object:
        """The value of a name, or None."""
        try:
            return eval(self._code(expression), self._globals)
        except (NameError, AttributeError, KeyError):
            return None

    def _code(self, expression: ast.expr) -> CodeType:
        return compile(ast.fix_missing_locations(ast.Expression(expression)), self._file, "eval")

    def _at(self, node: ast.AST) -> str:
        return f"{self._file}, line {getattr(node, 'lineno', '?')}"

    def _error(self, node: ast.AST, message: str) -> SchemaError:
        return SchemaError(message, self._at(node))


def _lines(text: str) -> str:
    """A string's text: without the indentation of a block in triple quotes, and ending its line."""
    if text.startswith("\n"):
        text = textwrap.dedent(text[1:]).rstrip(" \t")
    return text if text.endswith("\n") or not text else text + "\n"


def _slug(expression: str, fallback: str) -> str:
    """A module's name out of an expression: `city == "rome"` is city-rome."""
    words = re.findall(r"[\w.]+", expression)
    name = "-".join(words)[:60]
    return name if re.match(r"[^\W\d]", name) and name not in ROLES else f"{fallback}-{name}".rstrip("-")
