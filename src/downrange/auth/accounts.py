"""The users and ACLs of a server, and changes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from downrange.auth.policies import Acl
from downrange.auth.users import AccessRuleError, User, subject_of

Save = Callable[[Iterable[User], Iterable[Acl]], None]


@dataclass(eq=False)
class Accounts:
    """All users and ACLs, sorted by the names of the users.

    Holds always: a change is saved before it takes effect, so a user that was deleted does not come back; an ACL
    belongs to a user that exists.
    """

    save: Save = lambda users, acls: None
    users: Mapping[str, User] = field(default_factory=dict)
    acls: Mapping[str, Acl] = field(default_factory=dict)
    generation: int = 0
    """Grows with every change."""
    on_change: Callable[[], object] = lambda: None
    """Called after every change."""

    def __repr__(self) -> str:
        return f"<Accounts users={len(self.users)} acls={len(self.acls)} generation={self.generation}>"

    def put_user(self, user: User) -> None:
        self.replace_all([*self.users.values(), user], self.acls.values())

    def delete_user(self, username: str) -> None:
        """Remove a user, and its ACL; a user that does not exist is no error."""
        self.replace_all((user for name, user in self.users.items() if name != username), self.acls.values())

    def put_acl(self, acl: Acl) -> None:
        """Replace the ACL of a user; one without any rule is removed."""
        if acl.username not in self.users:
            raise AccessRuleError(f"The subject of {subject_of(acl.username)} is not exist.")
        self.replace_all(self.users.values(), [*self.acls.values(), acl])

    def delete_acl(self, username: str) -> None:
        self.put_acl(Acl(username, ()))

    def replace_all(self, users: Iterable[User], acls: Iterable[Acl]) -> None:
        """Take over a whole table; of two users or ACLs of one name the later one counts."""
        new_users = {user.username: user for user in sorted(users, key=lambda user: user.username)}
        by_name = {acl.username: acl for acl in sorted(acls, key=lambda acl: acl.username)}
        new_acls = {name: acl for name, acl in by_name.items() if name in new_users and acl.policies}
        if (new_users, new_acls) == (self.users, self.acls):
            return
        self.save(new_users.values(), new_acls.values())
        self.users, self.acls = new_users, new_acls
        self.generation += 1
        self.on_change()
