// SPDX-License-Identifier: GPL-2.0 OR Linux-OpenIB
// What is left of pipes to a program of the host in images of CRIU.
#include "agent/standard_streams.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "agent/criu_image.h"
#include "agent/file_tree.h"
#include "criu_files.pb.h"
#include "temp_folder.h"

namespace migr::standard_streams_test {
namespace {

namespace fs = std::filesystem;

constexpr std::uint32_t kFiles = 0x56303138, kDescriptors = 0x56213732, kRegular = 1, kPipe = 2, kSocket = 5;
constexpr char kOwner[] = "\x08\x01\x10\x02\x18\x03\x20\x04\x28\x05";
constexpr std::uint32_t kNo = 0;  // pipe

struct APipedContainer : ::testing::Test {
  void streams(const std::string& json) const { std::ofstream(dir + "/descriptors.json") << json; }
  template <class Message>
  void image(const std::string& name, std::uint32_t magic, const std::vector<Message>& all) const {
    std::ofstream(dir + "/" + name) << "";
    NewCriuImage i(magic);
    for (const auto& m : all) i.add(m);
    ASSERT_TRUE(i.replace(dir + "/" + name));
  }
  template <class Message>
  std::vector<Message> read(const std::string& name, std::uint32_t magic) const {
    CriuImage i(dir + "/" + name);
    EXPECT_TRUE(i.is(magic));
    std::vector<Message> all;
    for (Message m; !i.at_end() && i.next(m);) all.push_back(m);
    EXPECT_TRUE(i.at_end());
    return all;
  }
  static criu::File file(std::uint32_t id, std::uint32_t type, std::uint32_t pipe = kNo, std::uint32_t flags = 0) {
    criu::File f;
    f.set_id(id);
    f.set_type(type);
    f.GetReflection()->MutableUnknownFields(&f)->AddLengthDelimited(16, "what a socket has");
    if (pipe == kNo) return f;
    f.mutable_pipe()->set_id(id);
    f.mutable_pipe()->set_pipe_id(pipe);
    f.mutable_pipe()->set_flags(flags);
    f.mutable_pipe()->set_owner(kOwner);
    return f;
  }
  static criu::Descriptor descriptor(std::uint32_t number, std::uint32_t id, std::uint32_t type) {
    criu::Descriptor d;
    d.set_id(id);
    d.set_type(type);
    auto& rest = *d.GetReflection()->MutableUnknownFields(&d);
    rest.AddVarint(2, FD_CLOEXEC);
    rest.AddVarint(4, number);
    return d;
  }

  const TempFolder temp;
  const std::string dir = temp.path;
};

TEST_F(APipedContainer, HasItsNullDeviceInstead) {
  streams(R"(["pipe:[7]", "pipe:[8]", "/dev/pts/0"])");
  const auto in = file(1, kPipe, 7), out = file(2, kPipe, 8, O_WRONLY | O_NONBLOCK | O_DIRECT), own = file(3, kPipe, 9, O_WRONLY), socket = file(2, kSocket);
  image<criu::File>("files.img", kFiles, {in, socket, out, own});
  const auto its_own = descriptor(5, 3, kPipe), its_socket = descriptor(6, 2, kSocket);
  image<criu::Descriptor>("fdinfo-2.img", kDescriptors, {descriptor(0, 1, kPipe), descriptor(1, 2, kPipe), its_own, its_socket});
  image<criu::Descriptor>("fdinfo-3.img", kDescriptors, {descriptor(2, 2, kPipe)});
  const auto s = pipes_to_null(dir);
  ASSERT_TRUE(s) << s.error().text;

  const auto files = read<criu::File>("files.img", kFiles);
  ASSERT_EQ(files.size(), 4u);
  for (const auto& [at, flags] : {std::pair{0u, 0}, {2u, O_WRONLY | O_NONBLOCK}}) {
    EXPECT_EQ(files[at].type(), kRegular);
    EXPECT_FALSE(files[at].has_pipe());
    EXPECT_EQ(files[at].regular().id(), files[at].id());
    EXPECT_EQ(files[at].regular().name(), "/dev/null");
    EXPECT_EQ(files[at].regular().flags(), static_cast<std::uint32_t>(flags)) << "a device cannot be opened for packets";
    EXPECT_EQ(files[at].regular().owner(), kOwner);
  }
  EXPECT_EQ(files[1].SerializeAsString(), socket.SerializeAsString());
  EXPECT_EQ(files[3].SerializeAsString(), own.SerializeAsString());
  const auto its = read<criu::Descriptor>("fdinfo-2.img", kDescriptors);
  ASSERT_EQ(its.size(), 4u);
  EXPECT_EQ(its[0].SerializeAsString(), descriptor(0, 1, kRegular).SerializeAsString());
  EXPECT_EQ(its[1].SerializeAsString(), descriptor(1, 2, kRegular).SerializeAsString());
  EXPECT_EQ(its[2].SerializeAsString(), its_own.SerializeAsString());
  EXPECT_EQ(its[3].SerializeAsString(), its_socket.SerializeAsString());
  EXPECT_EQ(read<criu::Descriptor>("fdinfo-3.img", kDescriptors)[0].type(), kRegular);
}

TEST_F(APipedContainer, WithoutPipesNoImageIsLookedAt) {
  for (const char* none : {"[]", R"(["/dev/null", "/var/log/pipe:[7]", 3, "pipe:[x]"])", "null", ""}) {
    streams(none);
    EXPECT_TRUE(pipes_to_null(dir)) << none;
  }
}

TEST_F(APipedContainer, WhoseImagesAreDamagedIsNotRestored) {
  streams(R"(["pipe:[7]"])");
  for (const std::string bad : {"", "x", "not an image of CRIU at all"}) {
    std::ofstream(dir + "/files.img") << bad;
    const auto s = pipes_to_null(dir);
    ASSERT_FALSE(s);
    EXPECT_EQ(s.error().code, EIO);
  }
}

}  // namespace
}  // namespace migr::standard_streams_test
