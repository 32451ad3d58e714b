// Runs an AOTInductor artifact with PyTorch's C++ library: no Python, no kvcompile. All it knows is in manifest.json.
//
//   cmake -S examples/cpp -B build/cpp -DCMAKE_PREFIX_PATH=$(python -c 'import torch; print(torch.utils.cmake_prefix_path)')
//   cmake --build build/cpp
//   build/cpp/run_artifact FOLDER 24 5 17 3          24 new tokens after the prompt 5 17 3, on one line
//
// One sequence, greedy. docs/artifacts.md describes the protocol with batches and padding.

#include <ATen/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/from_file.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <algorithm>
#include <fstream>
#include <iostream>
#include <memory>
#include <sstream>
#include <unordered_map>

#include "json.h"

using at::Tensor;
using Tensors = std::unordered_map<std::string, Tensor>;
using torch::inductor::AOTIModelPackageLoader;

namespace {

constexpr int64_t kBlock = 64;  // slots are read in whole blocks

std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path + " cannot be read");
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

at::ScalarType dtype_of(const std::string& name) {
  static const std::unordered_map<std::string, at::ScalarType> known = {
      {"float64", at::kDouble}, {"float32", at::kFloat}, {"float16", at::kHalf}, {"bfloat16", at::kBFloat16},
      {"float8_e4m3fn", at::kFloat8_e4m3fn}, {"float8_e5m2", at::kFloat8_e5m2}, {"uint8", at::kByte},
      {"int8", at::kChar}, {"int16", at::kShort}, {"int32", at::kInt}, {"int64", at::kLong}, {"bool", at::kBool},
      // as safetensors names them
      {"F64", at::kDouble}, {"F32", at::kFloat}, {"F16", at::kHalf}, {"BF16", at::kBFloat16},
      {"F8_E4M3", at::kFloat8_e4m3fn}, {"F8_E5M2", at::kFloat8_e5m2}, {"U8", at::kByte}, {"I8", at::kChar},
      {"I16", at::kShort}, {"I32", at::kInt}, {"I64", at::kLong}, {"BOOL", at::kBool}};
  auto found = known.find(name);
  if (found == known.end()) throw std::runtime_error("no such dtype: " + name);
  return found->second;
}

// safetensors: 8 bytes that say how long the header is, the header in JSON, and the bytes of all tensors. They stay in
// the file, which the system maps into memory.
Tensors weights_of(const std::string& path, const at::Device& device) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) throw std::runtime_error(path + " cannot be read");
  const int64_t size = file.tellg();
  uint64_t length = 0;
  file.seekg(0);
  file.read(reinterpret_cast<char*>(&length), sizeof length);
  std::string header(length, '\0');
  file.read(header.data(), static_cast<std::streamsize>(length));
  Tensor bytes = at::from_file(path, /*shared=*/false, size, at::kByte);
  Tensors found;
  for (const auto& [name, of] : Json::parse(header).fields) {
    if (name == "__metadata__") continue;
    std::vector<int64_t> shape;
    for (const Json& each : of["shape"].items) shape.push_back(each.integer());
    const int64_t start = of["data_offsets"].items[0].integer(), end = of["data_offsets"].items[1].integer();
    const int64_t first = static_cast<int64_t>(sizeof length + length);
    found[name] = bytes.slice(0, first + start, first + end).view(dtype_of(of["dtype"].text)).view(shape).to(device);
  }
  return found;
}

class Artifact {
 public:
  explicit Artifact(const std::string& folder) : manifest_(Json::parse(contents(folder + "/manifest.json"))) {
    if (manifest_["format"].text != "kvcompile" || manifest_["format_version"].integer() != 1)
      throw std::runtime_error(folder + ": expected format kvcompile, version 1");
    if (manifest_["target"].text != "aoti")
      throw std::runtime_error(folder + ": an artifact for " + manifest_["target"].text + ", and this runs aoti");
    device_ = at::Device(manifest_["machine"]["device"].text);
    weights_ = weights_of(folder + "/weights.safetensors", device_);
    for (const Json& graph : manifest_["graphs"].items) {
      const std::string entry = graph["entry"].text;
      auto loader = std::make_unique<AOTIModelPackageLoader>(folder + "/" + graph["file"].text, entry);
      Tensors own;
      for (const std::string& name : loader->get_constant_fqns()) {
        // A constant that differs between graphs stands under the graph's name.
        auto special = weights_.find(entry + "/" + name);
        own[name] = special == weights_.end() ? weights_.at(name) : special->second;
      }
      // user_managed: the graph reads these tensors where they stand, so all graphs share one copy.
      loader->load_constants(own, /*use_inactive=*/false, /*check_full_update=*/true, /*user_managed=*/true);
      loaders_[entry] = std::move(loader);
    }
  }

  std::vector<int64_t> generate(const std::vector<int64_t>& prompt, int64_t count) {
    const int64_t vocab = manifest_["model"]["vocab_size"].integer();
    if (count < 1 || prompt.empty()) throw std::runtime_error("expected a prompt, and 1 new token or more");
    if (std::any_of(prompt.begin(), prompt.end(), [&](int64_t token) { return token < 0 || token >= vocab; }))
      throw std::runtime_error("expected token ids from 0 to " + std::to_string(vocab - 1));
    start(static_cast<int64_t>(prompt.size()) + count - 1);
    std::vector<int64_t> tokens;
    Tensor logits = append(prompt);
    while (true) {
      const int64_t token = logits.to(at::kFloat).argmax(-1).item<int64_t>();
      tokens.push_back(token);
      const auto& ends = manifest_["model"]["eos_token_ids"].items;
      const bool ended =
          std::any_of(ends.begin(), ends.end(), [&](const Json& end) { return end.integer() == token; });
      if (ended || static_cast<int64_t>(tokens.size()) == count) return tokens;
      logits = append({token});
    }
  }

 private:
  // An empty cache for a sequence of up to `tokens` tokens.
  void start(int64_t tokens) {
    const Json& limits = manifest_["limits"];
    if (!limits["max_tokens"].is_null() && tokens > limits["max_tokens"].integer())
      throw std::runtime_error("more tokens than the manifest's limits.max_tokens");
    given_.clear();
    std::map<std::string, int64_t> sizes = {{"batch", 1}};
    for (const Json& pages : manifest_["pages"].items) {
      // A page for each `page_size` tokens, up to `slots`; page 0 belongs to nobody.
      const int64_t page_size = pages["page_size"].integer(), slots = pages["slots"].integer();
      const int64_t own = (std::min(tokens, slots) + page_size - 1) / page_size;
      Tensor table = at::zeros({1, (slots + page_size - 1) / page_size}, at::kInt);
      table.slice(1, 0, own).copy_(at::arange(1, own + 1, at::kInt).unsqueeze(0));
      given_[pages["table"].text] = table.to(device_);
      sizes[pages["dimension"].text] = 1 + own;
    }
    for (const Json& cache : manifest_["caches"].items) {
      std::vector<int64_t> shape;
      for (const Json& size : cache["shape"].items)
        shape.push_back(size.is_text() ? sizes.at(size.text) : size.integer());
      Tensor made = at::zeros(shape, at::TensorOptions(dtype_of(cache["dtype"].text)).device(device_));
      if (!cache["fill"].is_null())  // one number per KV head, which is the second dimension
        for (size_t head = 0; head < cache["fill"].items.size(); ++head)
          made.select(1, static_cast<int64_t>(head)).fill_(cache["fill"].items[head].number);
      given_[cache["name"].text] = made;
    }
    seen_ = 0;
  }

  // A long prompt comes in passes, unless its tokens choose together what stays of it. Logits [V] of the last token.
  Tensor append(const std::vector<int64_t>& ids) {
    const Json& limits = manifest_["limits"];
    const int64_t tokens = static_cast<int64_t>(ids.size()), chunk = limits["prefill_chunk"].integer();
    const int64_t passes = limits["whole_prompts"].number != 0 ? 1 : (tokens + chunk - 1) / chunk;
    Tensor logits;
    for (int64_t number = 0; number < passes; ++number)
      logits = step({ids.begin() + tokens * number / passes, ids.begin() + tokens * (number + 1) / passes});
    return logits;
  }

  Tensor step(const std::vector<int64_t>& ids) {
    const int64_t tokens = static_cast<int64_t>(ids.size());
    const Json& graph = graph_for(tokens);
    const auto whole = at::TensorOptions(at::kLong);
    given_["input_ids"] = at::tensor(ids, whole).unsqueeze(0).to(device_);
    given_["positions"] = at::arange(seen_, seen_ + tokens, whole).unsqueeze(0).to(device_);
    given_["seq_lens"] = at::full({1}, seen_, whole).to(device_);  // before this call
    given_["keep"] = at::full({1}, tokens - 1, whole).to(device_);  // which tokens' logits are wanted
    const int64_t span = (seen_ + tokens + kBlock - 1) / kBlock * kBlock;  // only its length counts
    given_["slots"] = at::arange(std::min(span, manifest_["slots"].integer()), whole).to(device_);
    std::vector<Tensor> inputs;
    for (const Json& input : graph["inputs"].items) inputs.push_back(given_.at(input["name"].text));
    // The caches among the inputs are updated where they stand.
    Tensor logits = loaders_.at(graph["entry"].text)->run(inputs).at(0);
    seen_ += tokens;
    return logits.flatten();
  }

  // The first graph for so many tokens of one sequence.
  const Json& graph_for(int64_t tokens) const {
    for (const Json& graph : manifest_["graphs"].items) {
      const Json& batch = graph["inputs"].items[0]["shape"].items[0];
      if (graph["phase"].text == (tokens == 1 ? "decode" : "prefill") && (batch.is_text() || batch.integer() == 1))
        return graph;
    }
    throw std::runtime_error("the manifest has no graph for this call");
  }

  Json manifest_;
  at::Device device_ = at::kCPU;
  Tensors weights_, given_;
  std::map<std::string, std::unique_ptr<AOTIModelPackageLoader>> loaders_;
  int64_t seen_ = 0;
};

}  // namespace

int main(int count, char** words) try {
  if (count < 4) {
    std::cerr << "usage: run_artifact FOLDER NEW_TOKENS ID [ID ...]\n";
    return 2;
  }
  c10::InferenceMode guard;
  std::vector<int64_t> prompt;
  for (int number = 3; number < count; ++number) prompt.push_back(std::stoll(words[number]));
  for (int64_t token : Artifact(words[1]).generate(prompt, std::stoll(words[2]))) std::cout << token << ' ';
  std::cout << '\n';
  return 0;
} catch (const std::exception& error) {
  std::cerr << "run_artifact: " << error.what() << '\n';
  return 1;
}
