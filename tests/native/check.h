// A test is TEST(name) { ... CHECK(...) }. A failed check ends the process with its place and
// values, which is also what a sanitizer does.
#pragma once

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "status.h"

namespace check {

struct Test {
  const char* name;
  void (*run)();
};
inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}
struct Register {
  Register(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

[[noreturn]] inline void fail(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
  std::abort();
}

template <class A, class B>
void equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (a == b) return;
  std::ostringstream out;
  out << text << ": " << a << " is not " << b;
  fail(file, line, out.str());
}

// Waits, with a deadline, until the condition holds.
inline bool eventually(const std::function<bool()>& condition, double seconds = 20) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace check

#define TEST(name)                                      \
  static void name();                                   \
  static check::Register register_##name(#name, &name); \
  static void name()

#define CHECK(condition)                                                      \
  do {                                                                        \
    if (!(condition)) check::fail(__FILE__, __LINE__, "failed: " #condition); \
  } while (false)

#define CHECK_EQ(a, b) check::equal((a), (b), #a, __FILE__, __LINE__)

#define CHECK_OK(status)                                                               \
  do {                                                                                 \
    const ::ffi_transport::Status checked = (status);                                  \
    if (!checked.ok()) check::fail(__FILE__, __LINE__, #status ": " + checked.text()); \
  } while (false)

// The status is of this code and its text holds these words.
#define CHECK_FAILS(status, expected, words)                                             \
  do {                                                                                   \
    const ::ffi_transport::Status checked = (status);                                    \
    CHECK_EQ(static_cast<int>(checked.code()), static_cast<int>(expected));              \
    if (checked.text().find(words) == std::string::npos) {                               \
      check::fail(__FILE__, __LINE__, "'" + checked.text() + "' does not say " + words); \
    }                                                                                    \
  } while (false)
