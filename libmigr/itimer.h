/* SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB */
/*
 * CRIU (3.17 to 4.2, issue 2559) does not restore an interval timer that fires
 * once: alarm() and setitimer() without an interval are lost, and a program that
 * waits for SIGALRM (perftest -D does) waits for ever. With an interval they are
 * restored. So a frozen process's one-shot timers have one, so long that it never
 * comes to an end, until the process goes on.
 */
#ifndef MIGR_ITIMER_H
#define MIGR_ITIMER_H

namespace migr::itimer {

/// Thread: control thread; timers belong to the process. The application may set its timers meanwhile.
void hold();
void release();

}  // namespace migr::itimer

#endif
