"""Words that stand for states and kinds in data, as sentences: pages say them in the language of the reader."""

from __future__ import annotations

from typing import Final

from downrange.model.text import Text, as_is

_WORDS: Final = {
    str(one): one
    for one in (
        *(Text("bad"), Text("warning"), Text("note")),  # harm of findings
        *(Text("viewer"), Text("operator"), Text("admin")),  # roles
        *(Text("running"), Text("paused"), Text("stopped"), Text("done"), Text("waiting"), Text("failed")),  # jobs
        *(Text("refused"), Text("ready")),  # plans
        *(Text("not visible yet"), Text("filtered out"), Text("given up"), Text("being retried")),  # verdicts
        *(Text("consumed"), Text("nobody there"), Text("stuck"), Text("unknown")),
        *(Text("delayed"), Text("half message"), Text("rolled back")),  # why a message is hidden
        *(Text("sent"), Text("stored"), Text("transaction ended"), Text("recalled"), Text("delivered")),  # events
        Text("retry stored"),
        *(Text("reset offsets"), Text("skip what waits"), Text("clone offsets"), Text("move one queue")),  # plans
        *(Text("delete topic"), Text("delete group")),
        *(Text("broker settings"), Text("topic settings"), Text("group settings")),
        *(Text("topic"), Text("group"), Text("broker"), Text("retry"), Text("dead letters"), Text("system")),  # kinds
        *(Text("one-broker"), Text("all"), Text("producer"), Text("consumer")),
        *(Text("clustering"), Text("broadcasting")),  # models of groups
        *(Text("the console was restarted meanwhile"), Text("the letter is no longer there")),  # of jobs, in the file
        Text("no answer"),  # of a member
        *(Text("create user"), Text("change user"), Text("delete user")),  # of the page of users
        *(Text("put rule"), Text("delete rule"), Text("put account"), Text("delete account")),
        *(Text("text"), Text("hex"), Text("packed")),  # ways to read a body
        *(Text("auto"), Text("light"), Text("dark")),  # themes
    )
}


def word(text: str) -> Text:
    """A word of data as a sentence; a word that is not known stays as it is."""
    return _WORDS.get(text) or as_is(text)
