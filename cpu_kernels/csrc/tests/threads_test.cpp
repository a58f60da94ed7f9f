// Teams of threads: every member works once per run, and sees behind a barrier what the others did
// before it. The thread sanitizer watches.
#include "../threads.h"

#include "check.h"

using namespace twostroke;

void test_runs(int count, int size) {
  std::vector<int> first(size), second(size);
  for (int round = 1; round <= 200; ++round) {
    run_together(count, [&](const Member& member) {
      const Range mine = member.share(size);
      for (int i = mine.begin; i < mine.end; ++i) first[i] = round + i;
      member.wait();
      for (int i = mine.begin; i < mine.end; ++i) second[i] = first[size - 1 - i];
    });
    for (int i = 0; i < size; ++i)
      expect_equal("second", i, second[i], round + size - 1 - i);
  }
}

void test_sleepers_wake() {
  for (int round = 0; round < 5; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    test_runs(3, 7);
  }
}

int main() {
  for (int count : {1, 2, 3, 1, 4}) test_runs(count, 10);
  test_runs(4, 2);  // more threads than work
  test_sleepers_wake();
  std::thread other([] { test_runs(2, 100); });  // a team of its own, beside this thread's
  test_runs(2, 100);
  other.join();
}
