// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Where vQPNs were born. A QP is known to its peers by the GID and number of its birth for as long as it lives, so the host
// it was born on gives that number to nobody else from when it has first left (DIR/born.json): elsewhere, and at home again, the number is only its name. A process can make QPs wherever it
// lives: there may be several such hosts. The host that it lives on knows them (DIR/guests.json), sees when the process ends,
// and tells them; they forget the numbers then.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "config.h"
#include "json.h"
#include "process_session.h"
#include "status.h"

namespace migr {

/// What a host knows of births. Pure: the caller keeps it and tells migr.ko.
class BornBook {
 public:
  using Vqpns = std::vector<std::uint32_t>;
  /// As text() gave it, but for what is damaged.
  explicit BornBook(const std::string& text = "{}");
  std::string text() const;
  bool damaged() const { return damaged_; }

  /// Which numbers of a process that is here were born here.
  /// @param first_life  it was never restored: all of them
  Vqpns born_here(const Instance& who, const Vqpns& vqpns, bool first_life) const;
  /// It goes, and these were born here. Twice is as good as once. @return those to be released: it has them no more
  /// @param to  the host, or the folder
  Vqpns leave(const Instance& who, const Vqpns& born, const std::string& to);
  /// To where it has gone from here. None: nothing of it is reserved; empty: an older migrd did not write it down
  std::optional<std::string> away_at(const Instance& who) const;
  /// Processes come, with these. @return those to be released: born here, and nobody's any more
  Vqpns arrive(const std::vector<Instance>& who, const Vqpns& vqpns);
  /// It has ended, here or elsewhere; nothing happens if it was not there. @return those to be released
  Vqpns end(const Instance& who, bool elsewhere);
  /// Of all that are away, or were.
  Vqpns reserved() const;
  /// The same, with whose each is: on several devices there may be several.
  std::map<std::uint32_t, std::vector<Instance>> owners() const;
  /// Of one of them.
  std::vector<Instance> owners_of(std::uint32_t vqpn) const;

 private:
  Vqpns without_reserved(std::set<std::uint32_t> vqpns) const;
  struct Entry {
    std::set<std::uint32_t> born, foreign;
    bool away = false;
    std::string to{};
  };
  std::map<std::string, Entry> all_;  // by instance, in hexadecimal
  bool damaged_ = false;
};

/// The same on disk, with migr.ko told, and the guests. What cannot be read is an error, and is not written either. Thread: any.
class Numbers {
 public:
  using Vqpns = BornBook::Vqpns;
  explicit Numbers(const Config& config) : config_(config) {}

  /// Reserves what was born here and lives elsewhere, or has come back, if migr.ko does not know it: it may be loaded after us, and again.
  void reserve_again();
  Result<Vqpns> born_here(const Instance& instance, const Vqpns& vqpns, bool first_life) const;
  /// The hosts that keep numbers of a process that is here reserved when it goes. Empty: not known, or none.
  Result<std::vector<std::string>> births_of(const Instance& instance, const Vqpns& vqpns, bool first_life) const;
  /// Processes are about to go elsewhere: their end here is not their end.
  Status leave(const std::vector<Instance>& instances);
  /// One has gone. @param born  as born_here() said before
  Status left(const Instance& instance, const Vqpns& born, const std::string& to);
  Result<std::optional<std::string>> away_at(const Instance& instance) const;
  /// As BornBook.
  Result<std::map<std::uint32_t, std::vector<Instance>>> owners() const;
  Result<std::vector<Instance>> owners_of(std::uint32_t vqpn) const;
  /// Processes have come, with these numbers.
  Status arrive(const std::vector<Instance>& instances, const Vqpns& vqpns);
  /// One of them lives here (pid 0: and has ended). @param births  hosts to be told of its end; none: nobody is
  /// What could not be written down is known all the same; tick() tries again.
  Status note_guest(const Instance& instance, const std::vector<std::string>& births, pid_t pid);
  /// Such a one has not ended, or that cannot be read.
  bool guest_lives(const Instance& instance) const;
  /// This process is one.
  Result<bool> is_guest(pid_t pid) const;
  /// Processes have ended elsewhere.
  Status release(const std::vector<Instance>& instances);

  /// Guests that have ended are told to their birth hosts, to all at once, by `tell`; until it succeeds they are told again. Also
  /// reserve_again(). @return them
  /// @param held  by a migration: one of those may have gone on living elsewhere
  std::vector<Instance> tick(const std::function<Status(const std::string& host, const std::vector<Instance>&)>& tell, const std::function<bool(const Instance&)>& held = {});

 private:
  std::string path(const char* name) const { return config_.state_dir + "/" + name; }
  struct Kept {
    explicit Kept(BornBook b) : book(std::move(b)), reserved(book.reserved().size()) {}
    BornBook book;
    std::size_t reserved;  // numbers
  };
  Result<const Kept*> kept_book() const;
  Result<BornBook> book() const;  // to be changed
  Status write_book(BornBook b);
  Result<Json> guests() const;
  Status write(const char* name, const std::string& text) const;
  Status write_guests(const Json& all);
  void told(const std::string& host, const std::vector<Instance>& instances);
  const Config& config_;
  // As it was read or written last: what is stored may be kept, or come again, anywhere, so it only grows, and tick() wants it all the time.
  mutable std::optional<Kept> kept_;
  std::optional<Json> unwritten_;            // guests, if they could not be written down
  std::string unreserved_;                   // why numbers are not reserved, as was said last
  std::string unread_;                       // likewise why it is not known which guests have ended
  std::map<std::string, std::string> said_;  // of tick(): host, why it was not told
  mutable std::mutex mutex_;
};

}  // namespace migr
