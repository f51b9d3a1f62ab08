#include "protocol/text.h"

#include <string>
#include <string_view>

#include <doctest/doctest.h>

namespace larder::protocol {
namespace {

TEST_CASE("printable text is UTF-8 without control characters") {
  CHECK(is_printable(""));
  CHECK(is_printable("plain ~"));
  CHECK(is_printable("\u00a0\u07ff\u0800\u07ff\ue000\uffff\U00010000\U0010ffff"));
  for (const char* bad : {
           "\x1f",
           "\x7f",
           "a\n",
           "\xc2\x80",
           "\xc2\x9f",  // control characters
           "\x80",
           "\xbf",
           "\xc3",
           "\xc3(",
           "\xe2\x82",
           "\xf0\x9f\x99",  // not whole
           "\xc0\xaf",
           "\xc1\x81",
           "\xe0\x9f\xbf",
           "\xf0\x8f\xbf\xbf",  // overlong
           "\xed\xa0\x80",
           "\xed\xbf\xbf",  // surrogates
           "\xf4\x90\x80\x80",
           "\xf5\x80\x80\x80",
           "\xff",  // past the last character
       }) {
    CAPTURE(bad);
    CHECK_FALSE(is_printable(bad));
    CHECK(is_printable(printable(bad, 100)));
  }
  CHECK_FALSE(is_printable(std::string_view("a\0b", 3)));
}

TEST_CASE("text is made printable byte by byte and cut between characters") {
  CHECK(printable("a\xff\u00fc\nb", 100) == "a?\u00fc?b");
  CHECK(printable("\u00fc\u00fc", 4) == "\u00fc\u00fc");
  CHECK(printable("\u00fc\u00fc", 3) == "\u00fc");
  CHECK(printable("\u00fc", 1) == "");
  CHECK(printable("abc", 0) == "");
}

}  // namespace
}  // namespace larder::protocol
