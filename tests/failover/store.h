// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
#ifndef MIGR_TEST_FAILOVER_STORE_H
#define MIGR_TEST_FAILOVER_STORE_H

#include <cstddef>
#include <cstdint>

#include "../../include/migr/links_wire.h"

extern "C" {
/// A library, in the order in which they were loaded.
struct StoreProcess {
  void (*park)(char* why, std::size_t bytes);  ///< links::park()
  void (*let_go)();
  unsigned (*markers)();  ///< that its CQs still wait for
  std::size_t (*retired)();  ///< tables of keys that it keeps since they were replaced
};
void store_process(StoreProcess process);
std::size_t store_processes();
StoreProcess store_process_of(std::size_t from_last);
void store_publish(const std::uint8_t* instance, const migr_links_vqp* all, std::size_t n);
void store_withdraw(const migr_links_name* all, std::size_t n);
/// Who looks something up waits, as for a host that does not answer.
void store_hold_lookups(bool hold);
bool store_lookup_waits();
/// What is looked up cannot be: the host that knows does not answer.
void store_hide(bool hide);
/// migrd is away.
void store_go_away(bool away);
unsigned store_asked_in_vain();  ///< so many processes have
bool store_answers(const std::uint8_t* instance);
/// The port of this device, port 1, is preferred; null: none.
void store_prefer(const char* device);
/// What there is to be pushed to a process that was pushed so much. @return how much there is
unsigned store_pushes(unsigned before, migr_links_port* out);
void store_lookup(const migr_links_name* of, migr_links_found* out);
void store_channel(const std::uint8_t* instance, const migr_links_channel* own, migr_links_channel* out);
void store_end_channel(const std::uint8_t* instance, const migr_links_channel* own);
void store_links(const std::uint8_t* instance, const migr_links_link* all, std::size_t n);
bool store_link(const char* device, migr_links_link* out);  ///< as it was told last, by whichever process. False: by none
bool store_all_stand(std::uint32_t link);  ///< of each process: a channel over that link does
void store_states(const migr_links_vqp_state* all, std::size_t n);
bool store_state(const migr_links_name* of, migr_links_vqp_state* out);  ///< false: not known
/// The application's threads tell when they are outside of the library: once in each pass, and while they sleep.
void store_pass(int thread);
void store_sleep(int thread, bool sleeps);
int store_outside();  ///< waits until all have been outside. @return 0 or ETIMEDOUT
void store_switched(const migr_links_switch* all, std::size_t n);
void store_totals(migr_links_switch* out);   ///< since the last call
unsigned store_causes();                     ///< the same, a bit for each
}

#endif
