"""Each rule of dependencies.py on a small tree that keeps it and one that breaks it."""
import unittest

import dependencies as rules

SHARED = {
    "allocator/include/larder/status.h": "// Codes.\n#pragma once\n",
    "kernels/include/larder/kv_format.h": "// Formats.\n#pragma once\n",
    "client/include/larder/client.h": "// Client.\n#pragma once\n",
    "client/group_view.h": "// Group.\n#pragma once\n",
    "kernels/params.h": "// Params.\n#pragma once\n",
    "allocator/pool.h": "// Pool.\n#pragma once\n",
    "protocol/larder.capnp": "@0x0;\n",
    "protocol/channel.h": "// Channel.\n#pragma once\n",
    "daemon/session.h": "// Session.\n#pragma once\n",
    "tests/support/random.h": "// Random.\n#pragma once\n",
}


def including(path, *names, quote='""'):
    text = "".join(f"#include {quote[0]}{name}{quote[1]}\n" for name in names)
    return {**SHARED, path: text}


class DependencyDirection(unittest.TestCase):
    def broken(self, path, *names, **how):
        return list(rules.dependency_direction(including(path, *names, **how)))

    def test_each_folder_may_include_itself_and_the_shared_words(self):
        self.assertEqual(self.broken("allocator/a.cpp", "allocator/pool.h", "larder/status.h"), [])
        self.assertEqual(self.broken("kernels/a.cpp", "kernels/params.h", "larder/status.h"), [])
        self.assertEqual(self.broken("protocol/a.cpp", "protocol/channel.h", "larder/status.h"), [])

    def test_the_three_base_folders_do_not_know_each_other(self):
        self.assertEqual(
            self.broken("kernels/a.cpp", "larder/status.h", "allocator/pool.h"),
            ['kernels/a.cpp:2: kernels may not include "allocator/pool.h", which belongs to allocator'])
        self.assertEqual(len(self.broken("protocol/a.cpp", "larder/kv_format.h")), 1)
        self.assertEqual(len(self.broken("allocator/a.cpp", "protocol/channel.h")), 1)

    def test_daemon_and_client_know_the_three_and_nothing_knows_daemon(self):
        three = ("allocator/pool.h", "larder/kv_format.h", "protocol/channel.h")
        self.assertEqual(self.broken("daemon/a.cpp", "daemon/session.h", *three), [])
        self.assertEqual(self.broken("client/a.cpp", "larder/client.h", *three), [])
        self.assertEqual(len(self.broken("client/a.cpp", "daemon/session.h")), 1)
        self.assertEqual(self.broken("daemon/a.cpp", "client/group_view.h", *three), [])

    def test_tests_may_include_anything_and_nothing_includes_tests(self):
        self.assertEqual(self.broken("tests/a.cpp", "daemon/session.h", "larder/client.h"), [])
        self.assertEqual(len(self.broken("daemon/a.cpp", "tests/support/random.h")), 1)

    def test_generated_schema_headers_belong_to_the_folder_of_the_schema(self):
        self.assertEqual(self.broken("protocol/a.cpp", "protocol/larder.capnp.h"), [])
        self.assertEqual(self.broken("protocol/a.cpp", "larder.capnp.h"), [])
        self.assertEqual(len(self.broken("kernels/a.cpp", "larder.capnp.h")), 1)

    def test_angle_brackets_do_not_hide_a_dependency(self):
        self.assertEqual(len(self.broken("kernels/a.cpp", "allocator/pool.h", quote="<>")), 1)
        self.assertEqual(self.broken("kernels/a.cpp", "vector", "sys/mman.h", quote="<>"), [])

    def test_a_quoted_include_names_a_file_of_ours(self):
        self.assertEqual(len(self.broken("kernels/a.cpp", "boost/asio.hpp")), 1)
        self.assertEqual(len(self.broken("kernels/a.cpp", "larder/unknown.h")), 1)


class PublicHeaders(unittest.TestCase):
    def broken(self, *names, quote='""'):
        tree = including("client/include/larder/a.h", *names, quote=quote)
        return list(rules.public_headers_stand_alone(tree))

    def test_larder_and_the_standard_library_are_allowed(self):
        self.assertEqual(self.broken("larder/status.h"), [])
        self.assertEqual(self.broken("vector", "stdint.h", "system_error", quote="<>"), [])

    def test_private_headers_and_other_libraries_are_not(self):
        self.assertEqual(len(self.broken("kernels/params.h")), 1)
        self.assertEqual(len(self.broken("boost/asio.hpp", "spdlog/spdlog.h", quote="<>")), 2)


class Form(unittest.TestCase):
    def test_headers_start_with_a_paragraph_and_have_pragma_once(self):
        self.assertEqual(list(rules.header_form(SHARED)), [])
        self.assertEqual(len(list(rules.header_form({"daemon/a.h": "#pragma once\n"}))), 1)
        self.assertEqual(len(list(rules.header_form({"daemon/a.h": "// About.\n"}))), 1)

    def test_a_highway_header_has_its_toggling_guard_instead(self):
        guard = "// Rows.\n#if defined(ROWS_INL) == defined(HWY_TARGET_TOGGLE)\n"
        self.assertEqual(list(rules.header_form({"kernels/rows-inl.h": guard})), [])
        self.assertEqual(len(list(rules.header_form({"kernels/rows-inl.h": "// Rows.\n"}))), 1)

    def test_files_have_at_most_400_lines(self):
        self.assertEqual(list(rules.file_length({"daemon/a.cpp": "\n" * 400})), [])
        self.assertEqual(len(list(rules.file_length({"daemon/a.cpp": "\n" * 401}))), 1)
        self.assertEqual(list(rules.file_length({"README.md": "\n" * 401})), [])

    def test_left_overs_are_found_in_every_kind_of_file(self):
        for word in ("TO" + "DO", "FIX" + "ME", "X" * 3, "HA" + "CK", "not " + "implemented",
                     "place" + "holder", "st" + "ub"):
            self.assertEqual(len(list(rules.no_left_overs({"README.md": f"one\n{word}: x\n"}))), 1)
        self.assertEqual(list(rules.no_left_overs({"a.cpp": "stubborn HACKNEY // todo list\n"})), [])

    def test_tests_do_not_sleep(self):
        call = "std::this_thread::sleep" + "_for(1ms);\n"
        self.assertEqual(len(list(rules.no_sleep_in_tests({"tests/a.cpp": call}))), 1)
        self.assertEqual(len(list(rules.no_sleep_in_tests({"tests/a.sh": "sleep" + " 1\n"}))), 1)
        self.assertEqual(list(rules.no_sleep_in_tests({"daemon/a.cpp": call})), [])
        self.assertEqual(list(rules.no_sleep_in_tests({"tests/bench/a.cpp": call})), [])

    def test_paths_of_a_machine_are_found(self):
        for path in ("/wo" + "rk/main", "/home/" + "ann/larder", "/ro" + "ot/x"):
            self.assertEqual(len(list(rules.no_machine_paths({"README.md": f"cd {path}\n"}))), 1)
        relative = "/run/larder a/wo" + "rk/b $x/ro" + "ot/y\n"
        self.assertEqual(list(rules.no_machine_paths({"README.md": relative})), [])


class DeadSources(unittest.TestCase):
    def test_a_source_that_no_target_compiles_is_found(self):
        tree = {"daemon/a.cpp": "", "daemon/b.cpp": "", "deploy/c.cpp": "", "daemon/d.h": ""}
        self.assertEqual(list(rules.dead_sources(tree, ["daemon/a.cpp"])),
                         ["daemon/b.cpp: no target compiles it"])


if __name__ == "__main__":
    unittest.main()
