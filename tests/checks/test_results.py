"""results.py on the JUnit forms that CTest writes."""
import tempfile
import unittest

import results

REPORT = """<?xml version="1.0"?>
<testsuite name="Linux-c++" tests="6" failures="2" disabled="1" skipped="2">
  <testcase name="a" status="run"/>
  <testcase name="b" status="run"/>
  <testcase name="c" status="fail"><failure message=""/></testcase>
  <testcase name="d" status="disabled"/>
  <testcase name="e" status="notrun"><skipped message="SKIP_RETURN_CODE=77"/></testcase>
  <testcase name="f" status="notrun"><skipped message="Unable to find executable"/></testcase>
</testsuite>
"""


class Results(unittest.TestCase):
    def test_each_outcome_is_counted_and_a_test_that_cannot_start_has_failed(self):
        with tempfile.NamedTemporaryFile("w", suffix=".xml") as file:
            file.write(REPORT)
            file.flush()
            self.assertEqual(results.count([file.name]), {"passed": 2, "failed": 2, "skipped": 2})
            self.assertEqual(results.count([file.name, file.name])["passed"], 4)

    def test_no_file_counts_nothing(self):
        self.assertEqual(results.count([]), {"passed": 0, "failed": 0, "skipped": 0})


if __name__ == "__main__":
    unittest.main()
