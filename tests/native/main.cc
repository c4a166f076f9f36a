#include <cstring>

#include "check.h"

// Runs all tests, or those whose name contains the first argument.
int main(int count, char** arguments) {
  int ran = 0;
  for (const check::Test& test : check::tests()) {
    if (count > 1 && std::strstr(test.name, arguments[1]) == nullptr) continue;
    std::printf("%s\n", test.name);
    std::fflush(stdout);
    test.run();
    ++ran;
  }
  std::printf("%d native tests passed\n", ran);
  return ran > 0 ? 0 : 1;
}
