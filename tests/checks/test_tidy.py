"""The parts of tidy.py that need no compiler."""
import unittest

import tidy


class News(unittest.TestCase):
    def test_a_diagnostic_of_a_header_is_told_once_with_its_lines(self):
        output = "7 warnings generated.\na.h:1:2: error: first\n  code\n  ^\na.h:1:2: note: why\n"
        told = set()
        self.assertEqual(tidy.news(output, told), "a.h:1:2: error: first\n  code\n  ^\na.h:1:2: note: why")
        self.assertEqual(tidy.news(output, told), "")
        self.assertEqual(tidy.news("a.h:9:9: error: second\n", told), "a.h:9:9: error: second")


if __name__ == "__main__":
    unittest.main()
