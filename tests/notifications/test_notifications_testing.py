"""The rules of a store: SQLite and PostgreSQL keep them, and a store that breaks one is found."""

from __future__ import annotations

import pytest

from sampling_async.notifications import SqliteStore
from sampling_async.notifications._stores import store_of
from sampling_async.notifications.testing import StoreRules, check_store


class TestStores(StoreRules):
    @pytest.fixture(autouse=True)
    def _address(self, new_address):
        self.new_address = new_address

    def new_store(self):
        return store_of(self.new_address())

    def same_store(self, store):
        return store.copy()


class ForgetfulStore(SqliteStore):
    def settle(self, owner, settled):
        del owner, settled
        return True


def rules_of(folder, store_class):
    class Rules(StoreRules):
        count = 0

        def new_store(self):
            Rules.count += 1
            return store_class(folder / f"{Rules.count}.db")

    return Rules()


def test_all_rules_are_checked_without_pytest(tmp_path):
    names = [name for name in dir(StoreRules) if name.startswith("test_")]
    assert check_store(rules_of(tmp_path, SqliteStore)) == len(names) > 20


def test_a_store_that_breaks_a_rule_is_named_with_it(tmp_path):
    with pytest.raises(AssertionError, match=r"test_.*attempt"):
        check_store(rules_of(tmp_path, ForgetfulStore))
    with pytest.raises(NotImplementedError, match="return a new store"):
        StoreRules().new_store()
