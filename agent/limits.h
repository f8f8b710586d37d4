// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// Every limit and default of the agent, in one place; the unit is in the name.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

namespace migr {

inline constexpr char kRelease[] = "0.1.0";
inline constexpr std::uint32_t kWireVersion = 2;  // include/migr/wire.proto

// Paths that the configuration may change.
inline constexpr char kConfigPath[] = "/etc/migr/migrd.json";
inline constexpr char kPkiDir[] = "/etc/migr/pki";
inline constexpr char kStateDir[] = "/var/lib/migr";
inline constexpr char kRunDir[] = "/run/migr";  // containers see it: proc.sock and gates only
inline constexpr char kControlSocket[] = "/run/migrd/ctl.sock";
inline constexpr char kLibmigr[] = "/usr/lib/migr/libmigr.so";
inline constexpr char kListen[] = "0.0.0.0:7471";
inline constexpr char kMetrics[] = "127.0.0.1:7472";

// Limits that the configuration may change ("limits": {"lease_ms": 20000, ..}), once, at the start.
#define MIGR_LIMITS(X)                                                                                                                  \
  /* between hosts */                                                                                                                   \
  X(kCheckMs, "check_ms", 20'000)      /* is anybody there */                                                                           \
  X(kCallMs, "call_ms", 10'000)        /* a call that does little */                                                                    \
  X(kAbortMs, "abort_ms", 30'000)      /* a destination that answers takes back what it made */                                         \
  X(kPrepareMs, "prepare_ms", 120'000) /* create every object at the destination */                                                     \
  X(kUploadMs, "upload_ms", 600'000)                                                                                                    \
  X(kGoMs, "go_ms", 3'600'000)            /* a prepared restore waits for GO: memory is copied before. The lease is shorter */          \
  X(kReadyMs, "ready_ms", 110'000)        /* CRIU restores */                                                                           \
  X(kCommitMs, "commit_ms", 25'000)       /* below the plugin's 30 s: after it, it has aborted */                                       \
  X(kUndecidedMs, "undecided_ms", 60'000) /* how long the source asks a silent destination before it says so */                         \
  X(kPhaseMs, "phase_ms", 900'000)        /* any step of a phase of the coordinator: longer than each call's limit */                   \
  X(kTrialMs, "trial_ms", 5'000)          /* what a host writes to another one over RDMA, to see whether it arrives, is acknowledged */ \
  X(kRenewCallMs, "renew_call_ms", 4'000)                                                                                               \
  X(kLeaseMs, "lease_ms", 20'000)     /* without renewal the coordinator counts as gone */                                              \
  X(kResolveMs, "resolve_ms", 90'000) /* how long a host left alone asks for the outcome, often */                                      \
  X(kLeaseRenewMs, "lease_renew_ms", 1'000)                                                                                             \
  X(kProgressMs, "progress_ms", 1'000) /* between two words of how far a phase is */                                                    \
  X(kResolveStepMs, "resolve_step_ms", 1'000)                                                                                           \
  X(kResolveSlowMs, "resolve_slow_ms", 10'000) /* between two questions, after kResolveMs */                                            \
  /* to processes */                                                                                                                    \
  X(kProcessMs, "process_ms", 10'000) /* any request but drain */                                                                       \
  X(kWhereMs, "where_ms", 2'000)      /* of a connection to what has moved; a program's ibv_modify_qp() waits */                        \
  X(kParkMs, "park_ms", 20'000)       /* leave its backup links */                                                                      \
  X(kPerQpMs, "per_qp_ms", 10)        /* more, for each QP that a request is about */                                                   \
  X(kSuspendMs, "suspend_ms", 10'000) /* all threads seen outside */                                                                    \
  X(kDrainMs, "drain_ms", 10'000)                                                                                                       \
  X(kReconnectMs, "reconnect_ms", 20'000) /* a restored or thawed process at the gate */                                                \
  /* commands */                                                                                                                        \
  X(kRuncMs, "runc_ms", 60'000)                                                                                                         \
  X(kCheckpointMs, "checkpoint_ms", 120'000)                                                                                            \
  X(kCompareMs, "compare_ms", 60'000) /* a process's memory with what was copied ahead; then all of it is dumped */                     \
  X(kHookMs, "hook_ms", 60'000)                                                                                                         \
  X(kAheadMs, "ahead_ms", 2'000)                   /* the stop waits for those that are started before it */                            \
  X(kRestoreSocketMs, "restore_socket_ms", 50'000) /* partial restore: until the plugin listens */                                      \
  /* links */                                                                                                                           \
  X(kLinkCallMs, "link_call_ms", 3'000)        /* a question to the directory of links; a Redis engine's, too */                        \
  X(kLinkOutsideMs, "link_outside_ms", 10'000) /* all threads seen outside, for a process that asks */                                  \
  X(kLinkDownMs, "link_down_ms", 1)            /* a port is down so long before processes are told */                                   \
  X(kLinkUpMs, "link_up_ms", 1'000)            /* up so long; twice as much for each time it went down lately */                        \
  X(kLinkUpMaxMs, "link_up_max_ms", 30'000)    /* at most */                                                                            \
  X(kLinkFlapMs, "link_flap_ms", 60'000)       /* what lately is */                                                                     \
  /* tests */                                                                                                                           \
  X(kFaultHangMs, "fault_hang_ms", 900'000) /* fault.h: longer than anybody waits */
#define X(id, name, ms) inline int id = ms;
MIGR_LIMITS(X)
#undef X

/// To follow what one of these has ended. @param limit  the variable itself, for two may have one value @return empty: it is none of them
inline std::string advice_on(const int& limit) {
  const char* key = "";
#define X(id, name, ms) key = &limit == &id ? name : key;
  MIGR_LIMITS(X)
#undef X
  return *key ? std::string("; if it only needs longer, raise \"") + key + "\" in \"limits\" of migrd.json" : "";
}

/// How long a process may take with a request about so many QPs. A step of a phase takes less than kPhaseMs.
inline int process_ms(std::size_t qps) {
  const auto all = static_cast<std::uint64_t>(kProcessMs) + qps * static_cast<std::uint64_t>(kPerQpMs);
  return static_cast<int>(std::min(all, static_cast<std::uint64_t>(std::max(kProcessMs, kPhaseMs / 2))));
}

inline constexpr int kPluginCommitMs = 30'000;  // criu-plugin/restore.c

// Between hosts.
inline constexpr int kPeersMs = 15'000;  // how often a host asks whether its peers are there, for its metrics
// What the ports carry is sampled so often when nothing happens, and so often while a migration is renewed here.
inline constexpr int kTrafficIdlePeriodMs = 1'000, kTrafficClosePeriodMs = 100;
inline constexpr int kTrialsMax = 8;            // calls of TryPaths for no migration that a host answers at the same time; each has QPs and registered memory
inline constexpr int kTrafficPortsMs = 10'000;  // between looks for ports that have come or gone
inline constexpr int kTrafficCloseMs = 3'000;   // after the last renewal
inline constexpr int kTrafficKeepMs = 600'000;
inline constexpr std::size_t kTrafficSamples = 240;  // of a report: more of them are taken together
inline constexpr int kGuestsMs = 2'000;              // how often a host looks whether guests have ended
inline constexpr int kProgressSteps = 20;            // the longer a phase, the rarer are words of how far it is: after a 20th more
inline constexpr int kEndsMs = 3'000;                // of a migrd that was told to end: for what each role has begun
inline constexpr int kStandsStillStatus = 71;        // exit status of a migrd whose coordinator does not get on
// Copying less than this ahead of the stop takes longer than it saves.
inline constexpr std::uint64_t kPreCopyFromBytes = 64ull << 20;
// Another round of it is worth while as long as it halves what is left, and that is still so much.
inline constexpr unsigned kPreCopyRounds = 5, kPreCopyRoundsMax = 16;
// Beside the folder of images, on both hosts: the checkpoint, or the next round, refers to it by this name.
inline std::string pre_copy_dir(unsigned round) { return "pre-copy-" + std::to_string(round); }
inline constexpr std::size_t kChunkBytes = 1 << 20;
inline constexpr std::uint64_t kBundleBytes = 1ull << 30;

inline constexpr int kExecMs = 3'000;                   // a command that is run in a container just now may end
inline constexpr std::uint32_t kDrainMaxMs = 600'000;   // whatever is asked for; below phase_ms
inline constexpr std::uint32_t kStopMaxMs = 3'600'000;  // of a limit for the stop, whatever is asked for
inline constexpr std::uint32_t kCancelMs = 60'000;      // migrctl waits until all is back

inline constexpr int kBusyWaitMs = 180'000;  // for processes that another migration holds
inline constexpr int kBusyStepMs = 200;
inline constexpr int kFormingMs = 4'000;    // for programs that are just connecting; libmigr waits as long for those of librdmacm
inline constexpr int kBusyPauseMs = 1'500;  // a try that let go of everything begins again at most so much later
inline constexpr int kMigrateTries = 3;     // when resources change meanwhile; the last one makes such calls wait

// To processes.
inline constexpr int kHelloMs = 5'000;
inline constexpr int kAcceptAgainMs = 200;  // there was no descriptor for who connects
inline constexpr std::size_t kMaxSessions = 4096;
inline constexpr int kQuestions = 32;          // of processes, answered at the same time; half of them of one user
inline constexpr int kQuestionsWaiting = 512;  // for that; half of them of one user
// Of records, from a process that may be anybody's: of one question, and of one answer (a million registered keys). A message
// between hosts may be as large as such an answer.
inline constexpr std::size_t kQuestionBytes = 8 << 20, kAnswerBytes = 128 << 20;

// Links.
inline constexpr std::size_t kMaxLinkVqps = 1 << 20;  // published on this host; MIGR_LINKS_MAX_VQPS of one process
inline constexpr int kLinkAskAllMs = 2'000;           // a vQP that its birth host does not know is asked for everywhere so often
inline constexpr int kLinkSilentMs = 1'000;           // who does not answer is not asked again for so long
inline constexpr int kLinkWorkers = 8;                // questions to the directory at the same time, one of each process
inline constexpr int kLinkScanners = 8;               // processes whose threads are looked at, at the same time; half of it of one user
inline constexpr int kLinkPacketsPerS = 2'000;        // read of one process; it waits with more
inline constexpr int kLinkPushesKept = 64;            // packets for a process that does not read
inline constexpr int kLinkScanMs = 2'000;             // how often new and lost RDMA ports are looked for
inline constexpr std::uint32_t kLinkOrderMs = 5'000;  // migrctl waits for processes to carry out what it said
inline constexpr std::uint32_t kLinkOrderMaxMs = 600'000;
inline constexpr std::size_t kLinksFileBytes = 64 << 10;  // of the configuration that processes get
inline constexpr char kLinksFile[] = "/etc/migr/links.json";

// Of one thread scan.
inline constexpr int kScanStopMs = 1'000;  // a thread reaches its ptrace stop
inline constexpr int kScanRetryUs = 200;   // first pause before another look, doubled each time
inline constexpr int kScanRetryMaxUs = 20'000;
inline constexpr int kScanWalkMs = 1'000;           // the frames of one thread, walked by a process of its own
inline constexpr unsigned kMaxWalkReads = 1 << 18;  // of them, in memory; a frame takes some hundred
inline constexpr std::size_t kMaxThreads = 4096;
inline constexpr std::size_t kMaxStackBytes = 64u << 20;

// Commands.
inline constexpr int kNice = -10;  // while a container is stopped, everything else can wait

inline constexpr std::size_t kCommandOutputBytes = 64 << 10;  // kept of a command: the end of what it says
inline constexpr std::size_t kCommandAnswerBytes = 16 << 20;  // of its stdout, which may be read as a whole: `runc state` has all annotations

}  // namespace migr
