// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// An outcome: nothing or a value on success, else an errno and one line of text
// that says what failed, of what, and where it helps what to do.
#pragma once

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>
#include <variant>

namespace migr {

struct Error {
  int code = EIO;  // errno
  std::string text;
};

/// Of a call to another host: nobody answered, so nothing is known of the other side.
inline bool unreachable(const Error& e) { return e.code == EHOSTUNREACH || e.code == ETIMEDOUT; }

/// An error with strerror(code) appended.
inline Error sys_error(std::string what, int code = errno) {
  return Error{code, std::move(what) + ": " + std::strerror(code)};
}

template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : v_(std::move(value)) {}
  Result(Error e) : v_(std::move(e)) {}
  explicit operator bool() const { return v_.index() == 0; }
  T& operator*() { return std::get<0>(v_); }
  const T& operator*() const { return std::get<0>(v_); }
  T* operator->() { return &std::get<0>(v_); }
  const T* operator->() const { return &std::get<0>(v_); }
  const Error& error() const { return std::get<1>(v_); }

 private:
  std::variant<T, Error> v_;
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Error e) : failed_(true), e_(std::move(e)) {}
  template <class T>
  Status(const Result<T>& r) : failed_(!r) {
    if (!r) e_ = r.error();
  }
  explicit operator bool() const { return !failed_; }
  const Error& error() const { return e_; }

 private:
  bool failed_ = false;
  Error e_;
};

}  // namespace migr
