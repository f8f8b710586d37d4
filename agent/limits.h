// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Every limit and default of the agent, in one place; the unit is in the name.
#pragma once

#include <cstddef>
#include <cstdint>

namespace migr {

inline constexpr char kRelease[] = "0.1.0";
inline constexpr std::uint32_t kWireVersion = 1;  // include/migr/wire.proto

// Paths that the configuration may change.
inline constexpr char kConfigPath[] = "/etc/migr/migrd.json";
inline constexpr char kPkiDir[] = "/etc/migr/pki";
inline constexpr char kStateDir[] = "/var/lib/migr";
inline constexpr char kRunDir[] = "/run/migr";  // containers see it: proc.sock and gates only
inline constexpr char kControlSocket[] = "/run/migrd/ctl.sock";
inline constexpr char kListen[] = "0.0.0.0:7471";

// Between hosts.
inline constexpr int kCheckMs = 20'000;         // is anybody there
inline constexpr int kCallMs = 10'000;          // a call that does little
inline constexpr int kAbortMs = 30'000;         // a destination that answers takes back what it made
inline constexpr int kPrepareMs = 120'000;      // create every object at the destination
inline constexpr int kUploadMs = 600'000;
inline constexpr int kReadyMs = 110'000;        // CRIU restores; below the plugin's 120 s for GO
inline constexpr int kCommitMs = 25'000;        // below the plugin's 30 s: after it, it has aborted
inline constexpr int kUndecidedMs = 60'000;     // how long the source asks a silent destination
inline constexpr int kLeaseRenewMs = 1'000;
inline constexpr int kRenewCallMs = 4'000;
inline constexpr int kLeaseMs = 20'000;         // without renewal the coordinator counts as gone
inline constexpr int kResolveMs = 90'000;       // how long a host left alone asks for the outcome
inline constexpr int kResolveStepMs = 1'000;
// Copying less than this ahead of the stop takes longer than it saves.
inline constexpr std::uint64_t kPreCopyFromBytes = 64ull << 20;
// Beside the folder of images, on both hosts: the checkpoint refers to it by this name.
inline constexpr char kPreCopyDir[] = "pre-copy";
inline constexpr std::size_t kChunkBytes = 1 << 20;
inline constexpr std::uint64_t kBundleBytes = 1ull << 30;

inline constexpr int kMigrateTries = 3;         // when resources change meanwhile; the last one makes such calls wait

// To processes.
inline constexpr int kHelloMs = 5'000;
inline constexpr int kProcessMs = 10'000;       // any request but drain
inline constexpr int kSuspendMs = 10'000;       // all threads seen outside
inline constexpr int kDrainMs = 10'000;
inline constexpr int kReconnectMs = 20'000;     // a restored or thawed process at the gate
inline constexpr std::size_t kMaxSessions = 4096;
inline constexpr std::size_t kMaxTextRanges = 64;

// Of one thread scan.
inline constexpr int kScanStopMs = 1'000;       // a thread reaches its ptrace stop
inline constexpr int kScanRetryUs = 200;        // first pause before another look, doubled each time
inline constexpr int kScanRetryMaxUs = 20'000;
inline constexpr std::size_t kMaxThreads = 4096;
inline constexpr std::size_t kMaxStackBytes = 64u << 20;

// Commands.
inline constexpr int kRuncMs = 60'000;
inline constexpr int kCheckpointMs = 120'000;
inline constexpr int kHookMs = 60'000;
inline constexpr int kRestoreSocketMs = 50'000;  // partial restore: until the plugin listens

inline constexpr int kNice = -10;                // while a container is stopped, everything else can wait

inline constexpr std::size_t kCommandOutputBytes = 64 << 10;  // kept of a command

}  // namespace migr
