// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// The TCP connection between the two ends: framed messages, kept open for the whole run.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace verify {

enum class Msg : std::uint32_t {
  kHello = 1,  // client: Shape and limits
  kAccept,     // server: its limits
  kConnect,    // both: GID, memory, QPs
  kReady,      // both: may be sent to
  kStop,       // post nothing more
  kFin,        // u64 per QP: WRs posted on my stream
  kDone,       // all that I posted is done and all that I was sent has come
  kMemory,     // u64: digest of what my partner wrote here
  kResult,     // u64 faults, then text of the first
  kAbort,      // text
  kChecked,    // u64 per QP: how far your stream has been checked, where an RDMA WRITE of it could be lost
  kBroken,     // two u64 per QP: WRs of my stream that have completed with success, and that were posted; nothing is on its way
};

struct Message {
  Msg type;
  std::string body;
};

/// Setting up failed; the text says what and what to do.
struct SetupError : std::runtime_error {
  using std::runtime_error::runtime_error;
};
/// The partner is gone or talks nonsense.
struct PeerError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Control {
 public:
  static Control serve(const std::string& bind, int port, double limit_s);
  static Control connect(const std::string& server, const std::string& bind, int port, double limit_s);
  Control(Control&& o) noexcept : fd_(o.fd_), in_(std::move(o.in_)) { o.fd_ = -1; }
  Control& operator=(Control&&) = delete;
  ~Control();

  int fd() const { return fd_; }
  void send(Msg type, const std::string& body = {});
  /// @return a message that is there; never waits. Throws PeerError at the end of the connection.
  std::optional<Message> poll();
  /// Waits for the next message, which must be of this type (kAbort throws PeerError with its text).
  std::string expect(Msg type, double limit_s);

 private:
  explicit Control(int fd);
  int fd_;
  std::string in_;
};

}  // namespace verify
