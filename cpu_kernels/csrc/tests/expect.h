// What the tests have in common: count mismatches, tell the first ones, return whether there were
// any.
#pragma once

#include <cmath>
#include <cstdio>

inline int mismatches = 0;

inline void expect_near(const char* what, double input, double found, double wanted,
                        double relative) {
  const bool same = std::isnan(wanted) ? std::isnan(found)
                                       : found == wanted ||
                                             std::abs(found - wanted) <= relative * std::abs(wanted);
  if (same) return;
  if (++mismatches <= 10)
    std::printf("%s(%.9g) is %.9g, should be %.9g\n", what, input, found, wanted);
}

inline void expect_equal(const char* what, double input, double found, double wanted) {
  expect_near(what, input, found, wanted, 0);
}

inline int result() { return mismatches > 0; }
